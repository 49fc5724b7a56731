"""gRPC in place of HTTP: the messages of `rayllm.proto`, and a server that asks the HTTP app in this process."""
