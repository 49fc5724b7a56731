"""The service behind the HTTP app: where prompts are rendered, and how the router is asked."""

import asyncio

import pytest

from rayllm.errors import Overloaded, RequestError
from rayllm.serving.renderer_server import Refused, RenderChat, RenderText
from rayllm.serving.router import QUIET_S, Pick, RouterClient
from rayllm.serving.service import SMALL_PROMPT, ServiceImpl, _render_call
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


def make_service(renderer_handle=None):
    service = ServiceImpl(WordRenderer(), "demo", "test", SessionLimits(admit_wait_s=0.05))
    if renderer_handle is not None:
        from rayllm.serving.batcher import Batcher

        service._rendering = Batcher(_render_call(renderer_handle))
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


async def test_before_the_engines_are_there():
    service = make_service()
    assert "starting" in service.healthy()
    assert service.load() == 0
    assert b"process_" in await service.metrics()
    with pytest.raises(Overloaded):
        await service.submit([])


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
