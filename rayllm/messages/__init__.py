"""What crosses processes, filed by receiver: `engine`, `ingress`, `worker`; and `sampling`, what a request asks for.

All are msgspec structs, sent as length-prefixed msgpack; none is ever pickled on a socket.
"""
