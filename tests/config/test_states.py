"""What cannot be honoured is refused by name; what has no effect is said."""

import pytest

from rayllm.config.hardware import Hardware
from rayllm.config.option import Kind, State
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.states import check_states
from rayllm.config.twins import TWINS
from rayllm.errors import ConfigError

KEYS_WITH_OPTIONS = {f"--{many}.{key}" for _, many, key in TWINS}
HERE = Hardware(cpus=2, memory=1 << 30)
WITH_GPU = Hardware(cpus=2, memory=1 << 30, cuda=True)


def checked(*arguments: str, hardware: Hardware = HERE) -> tuple[str, ...]:
    values = parse_arguments(arguments, registry())
    return (*values.notes, *check_states(values, registry(), hardware))


@pytest.mark.parametrize("option", [o for o in registry() if o.state is not State.EFFECTIVE], ids=lambda o: o.name)
def test_defaults_can_always_be_written_out(option) -> None:
    if option.default is None:
        return
    values = registry().values({option.name: option.default})
    assert check_states(values, registry(), HERE) == ()


@pytest.mark.parametrize("option", [o for o in registry() if o.state is State.PLANNED], ids=lambda o: o.name)
def test_what_is_planned_is_refused(option) -> None:
    another = _another(option)
    if another is None:
        pytest.skip("all of its values are honoured, or its keys are options of their own")
    values = registry().values({option.name: another})
    with pytest.raises(ConfigError, match=f"{option.flag}.*not supported yet; "):
        check_states(values, registry(), HERE)


@pytest.mark.parametrize("option", [o for o in registry() if o.state is State.CUDA], ids=lambda o: o.name)
def test_what_needs_a_gpu_is_refused_or_warned_of(option) -> None:
    values = registry().values({option.name: _another(option)})
    if option.warns:
        (warning,) = check_states(values, registry(), HERE)
        assert warning.startswith(f"{option.flag} has no effect: ")
    else:
        with pytest.raises(ConfigError, match=f"{option.flag}.*needs a CUDA GPU"):
            check_states(values, registry(), HERE)
    with pytest.raises(ConfigError, match=f"{option.flag}.*not supported yet"):
        check_states(values, registry(), WITH_GPU)


def _another(option):
    """A value that asks for something."""
    if option.keyed:
        return next(
            (
                {key: another}
                for key, value in option.default.items()
                if (another := {bool: not value, int: 7, str: "x", list: ["x"]}.get(type(value))) is not None
                and f"--{option.name}.{key}" not in KEYS_WITH_OPTIONS
            ),
            None,
        )
    match option.kind:
        case Kind.BOOL:
            return next(b for b in (True, False) if b not in (option.default, *option.honoured))
        case Kind.ENUM | Kind.INT if option.choices:
            return next((c for c in option.choices if c not in (option.default, *option.honoured, "None")), None)
        case Kind.INT | Kind.HUMAN_INT:
            return next(
                n for n in range(int(option.minimum or 0), 1 << 30) if n not in (option.default, *option.honoured)
            )
        case Kind.FLOAT:
            return 0.5
        case Kind.LIST:
            return [4] if option.integers else ["x"]
        case Kind.JSON:
            return {"x": 1}
    return "other"


def test_a_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--compilation-config\.mode: is not supported yet"):
        checked("-cc.mode=3")
    assert checked("-cc.mode=0") == ()
    with pytest.raises(ConfigError, match=r"--attention-config\.use_cudnn_prefill: needs a CUDA GPU"):
        checked("-ac.use_cudnn_prefill", "true")


def test_two_spellings_of_a_setting_are_one() -> None:
    values = parse_arguments(["-ac.backend", "torch"], registry())
    assert values["attention-backend"] == "torch"
    assert check_states(values, registry(), HERE) == ()
    same = parse_arguments(["--moe-backend", "emulation", "--kernel-config.moe_backend", "emulation"], registry())
    assert same["kernel-config"]["moe_backend"] == "emulation"
    assert check_states(same, registry(), HERE) == ()
    with pytest.raises(ConfigError, match=r"--moe-backend.*'auto'.*--kernel-config.moe_backend is 'emulation'"):
        checked("--moe-backend", "auto", "--kernel-config.moe_backend", "emulation")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--disable-log-requests"], ["--no-enable-log-requests"]),
        (["--task", "generate"], ["--runner", "generate"]),
        (["--task", "embed"], ["--runner", "pooling", "--convert", "embed"]),
        (["--rope-theta", "5000"], ["--hf-overrides.rope_theta", "5000.0"]),
        (["--rope-scaling.factor", "2.0"], ["--hf-overrides.rope_scaling.factor", "2.0"]),
        (["--guided-decoding-backend", "xgrammar"], ["--structured-outputs-config.backend", "xgrammar"]),
        (["--eplb-window-size", "5"], ["--eplb-config.window_size", "5"]),
        (["--cuda-graph-sizes", "1", "2"], ["--cudagraph-capture-sizes", "1", "2"]),
        (["--cuda-graph-sizes", "8"], ["--max-cudagraph-capture-size", "8"]),
        (["--override-pooler-config.normalize", "false"], ["--pooler-config.normalize", "false"]),
        (["--swap-space", "4"], []),
        (["--preemption-mode", "recompute"], []),
    ],
)
def test_older_options_mean_what_they_meant(old, new) -> None:
    before, now = (parse_arguments(arguments, registry()) for arguments in (old, new))
    assert dict(before) == dict(now)
    (note,) = before.notes
    assert note.startswith(f"{old[0].split('.')[0]} is deprecated")
    assert all(word in note for word in new)
    assert now.notes == ()


def test_an_older_option_must_not_contradict_its_successor() -> None:
    with pytest.raises(ConfigError, match="--disable-log-requests: contradicts --enable-log-requests"):
        checked("--disable-log-requests", "--enable-log-requests")
    with pytest.raises(ConfigError, match=r"--rope-theta: contradicts --hf-overrides\.rope_theta"):
        checked("--rope-theta", "5", "--hf-overrides.rope_theta", "6")
    with pytest.raises(ConfigError, match="--mm-processor-kwargs"):
        checked("--mm-processor-kwargs", "{}")
