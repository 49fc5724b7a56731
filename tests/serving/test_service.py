"""The service behind the HTTP app: where prompts are rendered, and how the router is asked."""

import asyncio
import threading

import pytest

from rayllm.config.serve import FrontendSettings
from rayllm.errors import Overloaded, RequestError
from rayllm.render.renderer import Renderer
from rayllm.serving import renderer_server
from rayllm.serving import service as service_module
from rayllm.serving.renderer_server import Refused, RenderChat, RendererServer, RenderText
from rayllm.serving.router import QUIET_S, Pick, RouterClient
from rayllm.serving.service import SMALL_PROMPT, ServiceImpl
from rayllm.serving.wire import SessionLimits


class Call:
    """Stands for a deployment's method: `handle.method.remote(argument)`."""

    def __init__(self, function):
        self.arguments = []
        self._function = function

    def remote(self, argument):
        self.arguments.append(argument)
        return asyncio.ensure_future(self._function(argument))


class Handle:
    def __init__(self, **functions):
        for name, function in functions.items():
            setattr(self, name, Call(function))


class WordRenderer:
    """One token a character."""

    def tokenize(self, text, add_special_tokens=True):
        return list(text.encode())

    def render_chat(self, messages, tools, options):
        return self.tokenize("".join(message["content"] for message in messages))


class SlowRenderer(WordRenderer):
    """Notes how many prompts are rendered at the same time, and waits until `wanted` are."""

    def __init__(self, wanted):
        self._together = threading.Barrier(wanted)
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0

    def tokenize(self, text, add_special_tokens=True):
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        self._together.wait(5)
        with self._lock:
            self._running -= 1
        return super().tokenize(text)


def make_service(renderer_handle=None, renderer=None, **more):
    service = ServiceImpl(renderer or WordRenderer(), "demo", "test", SessionLimits(admit_wait_s=0.05), **more)
    if renderer_handle is not None:
        service.render_in(renderer_handle)
    return service


async def test_small_prompts_are_rendered_here():
    async def render(jobs):
        raise AssertionError("not to be called")

    service = make_service(Handle(render=render))
    assert await service.tokenize("abc", True) == [97, 98, 99]
    assert await service.render_chat([{"content": "ab"}], None, {}) == [97, 98]


async def test_long_prompts_go_to_the_renderer_together():
    async def render(jobs):
        return [[len(job.text)] if isinstance(job, RenderText) else [len(job.messages)] for job in jobs]

    handle = Handle(render=render)
    service = make_service(handle)
    long = "x" * (SMALL_PROMPT + 1)
    ids = await asyncio.gather(
        service.tokenize(long, True), service.tokenize(long, False), service.render_chat([{"content": long}], None, {})
    )
    assert ids == [[len(long)], [len(long)], [1]]
    [jobs] = handle.render.arguments
    assert [type(job) for job in jobs] == [RenderText, RenderText, RenderChat]


async def test_a_refusal_of_the_renderer_is_the_request_s():
    async def render(jobs):
        return [Refused("no such role", "messages")]

    service = make_service(Handle(render=render))
    with pytest.raises(RequestError) as caught:
        await service.render_chat([{"content": "x" * (SMALL_PROMPT + 1)}], None, {})
    assert caught.value.param == "messages"


async def test_a_lost_renderer_is_no_loss():
    async def render(jobs):
        raise RuntimeError("the actor died")

    long = "x" * (SMALL_PROMPT + 1)
    assert len(await make_service(Handle(render=render)).tokenize(long, True)) == len(long)
    assert len(await make_service().tokenize(long, True)) == len(long)


@pytest.mark.option("renderer-num-workers")
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("length", [10, SMALL_PROMPT + 1])
async def test_so_many_prompts_are_rendered_at_the_same_time(workers, length):
    renderer = SlowRenderer(workers)
    service = make_service(renderer=renderer, render_workers=workers)
    conversation = [{"content": "x" * length}]
    ids = await asyncio.gather(
        *(service.tokenize("x" * length, True) for _ in range(4)),
        *(service.render_chat(conversation, None, {}) for _ in range(4)),
    )
    assert [len(one) for one in ids] == [length] * 8
    assert renderer.most == workers
    await service.close()


@pytest.mark.option("renderer-num-workers")
@pytest.mark.parametrize("workers", [1, 4])
async def test_so_many_in_the_renderer_too(workers, monkeypatch):
    renderer = SlowRenderer(workers)
    monkeypatch.setattr(renderer_server, "configure_logging", lambda level: None)
    monkeypatch.setattr(Renderer, "load", lambda settings: renderer)
    settings = FrontendSettings(
        model_path="m", served_model_names=("m",), tokenizer_path="m", max_model_len=100, vocab_size=10,
        eos_token_ids=(), render_workers=workers,
    )  # fmt: skip
    server = RendererServer(settings, "WARNING")
    service = make_service(Handle(render=server.render), render_workers=workers)
    long = "x" * (SMALL_PROMPT + 1)
    ids = await asyncio.gather(*(service.tokenize(long, True) for _ in range(4)))
    assert [len(one) for one in ids] == [len(long)] * 4
    assert renderer.most == workers


async def test_before_the_engines_are_there():
    service = make_service()
    assert "starting" in service.healthy()
    assert await service.load() == 0
    assert b"process_" in await service.metrics()
    with pytest.raises(Overloaded):
        await service.submit([])


@pytest.mark.option("enable-server-load-tracking")
async def test_every_process_knows_the_load_of_all(service, helpers, monkeypatch):
    monkeypatch.setattr(service_module, "machine_address", lambda: "here")
    monkeypatch.setattr(service_module, "ServeDirectory", lambda engines, host: service.directory)
    engine = service.add_engine()
    one, other = (ServiceImpl(None, "demo", name, helpers.limits) for name in ("one", "other"))
    for each in (one, other):
        each.attach(None)
        await each.wait_healthy()
    streams = await one.submit([helpers.add([5, i]) for i in range(3)])
    assert await one.load() == await other.load() == 3
    for stream in streams:
        stream.abort()
    await helpers.until(lambda: engine.load().running == 0)
    assert await one.load() == await other.load() == 0
    for each in (one, other):
        await each.close()


async def test_the_router_is_asked_for_all_that_wait():
    async def pick(picks):
        await asyncio.sleep(0.01)
        return [pick.candidates[-1] for pick in picks]

    handle = Handle(pick=pick)
    client = RouterClient(handle)
    assert await asyncio.gather(*(client.choose(["a", "b"]) for _ in range(5))) == ["b"] * 5
    assert handle.pick.arguments == [[Pick(("a", "b"))] * 5]


@pytest.mark.parametrize("failure", ["error", "silence"])
async def test_a_lost_router_is_left_alone_for_a_while(failure):
    async def pick(picks):
        if failure == "error":
            raise RuntimeError("the actor died")
        await asyncio.sleep(60)

    handle = Handle(pick=pick)
    client = RouterClient(handle)
    assert await client.choose(["a", "b"]) is None
    began = asyncio.get_running_loop().time()
    assert await client.choose(["a", "b"]) is None
    assert asyncio.get_running_loop().time() - began < 0.05
    assert len(handle.pick.arguments) == 1
    client._quiet_until -= QUIET_S
    assert await client.choose(["a", "b"]) is None
    assert failure == "silence" or len(handle.pick.arguments) == 2
