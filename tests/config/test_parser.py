"""The command line, YAML and mappings give the same values, or an error that names the option."""

import pytest

from rayllm.config.option import Kind, Option, human_int
from rayllm.config.parser import parse_arguments, parse_mapping
from rayllm.config.registry import Registry, registry
from rayllm.errors import ConfigError

TOY = Registry(
    {
        "toy": (
            Option(name="model", kind=Kind.STR, help=""),
            Option(name="config", kind=Kind.STR, help=""),
            Option(name="size", kind=Kind.INT, aliases=("-sz",), minimum=1, default=1, help=""),
            Option(name="length", kind=Kind.HUMAN_INT, auto=True, minimum=1, help=""),
            Option(name="color", kind=Kind.ENUM, choices=("red", "green"), help=""),
            Option(name="names", kind=Kind.LIST, help=""),
            Option(name="paths", kind=Kind.LIST, separator=",", help=""),
            Option(name="extra", kind=Kind.JSON, aliases=("-x",), default={}, help=""),
            Option(name="fast", kind=Kind.BOOL, default=False, help=""),
            Option(name="quiet", kind=Kind.BOOL, default=False, negatable=False, help=""),
            Option(name="added", kind=Kind.LIST, repeats=True, help=""),
            Option(name="numbers", kind=Kind.LIST, integers=True, help=""),
            Option(name="token", kind=Kind.STR, bare=True, help=""),
            Option(name="place", kind=Kind.JSON, plain=True, default="cpu", help=""),
            Option(name="rank", kind=Kind.INT, choices=(1, 8), default=1, help=""),
            Option(
                name="many",
                kind=Kind.JSON,
                keyed=True,
                default={"mode": None, "size": 1, "on": False, "inner": {"a": 1, "b": 2}},
                help="",
            ),
            Option(name="level", kind=Kind.INT, aliases=("-O",), default=2, help=""),
        )
    }
)


def given(*arguments):
    values = parse_arguments(arguments, TOY)
    return {name: values[name] for name in values.given}


@pytest.mark.parametrize("arguments", [["--length", "8k"], ["--length=8k"], ["--length", "8000"]])
def test_spellings_of_a_value_are_the_same(arguments):
    assert given(*arguments) == {"length": 8000}


def test_underscores_stand_for_dashes():
    assert parse_arguments(["--max_model_len", "8k"], registry())["max-model-len"] == 8000


@pytest.mark.parametrize(
    ("text", "number"), [("1k", 1000), ("1K", 1024), ("2M", 2097152), ("25.6k", 25600), ("3g", 3 * 10**9), ("17", 17)]
)
def test_human_integers(text, number):
    assert human_int(text) == number


@pytest.mark.parametrize("text", ["1.5K", "1.5", "k", "", "1kk", "1 k", "0.0001k", "abc", "1e3"])
def test_what_is_no_human_integer(text):
    with pytest.raises(ValueError):
        human_int(text)


@pytest.mark.parametrize("text", ["-1", "auto"])
def test_automatic_length(text):
    assert given("--length", text) == {"length": -1}


@pytest.mark.parametrize("arguments", [["m", "--size", "2"], ["--size=2", "m"], ["--model", "m", "-sz", "2"]])
def test_the_model_is_positional_or_named(arguments):
    assert given(*arguments) == {"model": "m", "size": 2}


def test_booleans():
    assert given("--fast") == {"fast": True}
    assert given("--no-fast") == {"fast": False}
    assert given("--fast", "--no-fast") == {"fast": False}


def test_lists_take_several_values_or_json_or_commas():
    assert given("--names", "a", "b", "--size", "3") == {"names": ["a", "b"], "size": 3}
    assert given("--names", '["a", "b"]') == {"names": ["a", "b"]}
    assert given("--names=a,b") == {"names": ["a,b"]}
    assert given("--paths", "/a,/b") == {"paths": ["/a", "/b"]}


def test_dotted_keys_equal_json():
    whole = given("--extra", '{"key1": "value1", "key2": {"key3": "value2"}}')
    assert given("--extra.key1", "value1", "--extra.key2.key3", "value2") == whole
    assert given("-x.key1=value1", "-x.key2.key3=value2") == whole
    assert given("-x.n", "3", "-x.b=true", "-x.z", "null", "-x.s", "3 apples") == {
        "extra": {"n": 3, "b": True, "z": None, "s": "3 apples"}
    }


def test_list_elements_are_appended():
    assert given("--extra.key4+", "value3", "--extra.key4+=value4,value5") == {
        "extra": {"key4": ["value3", "value4", "value5"]}
    }


def test_parts_of_one_json_option_are_merged_and_the_last_wins():
    assert given("--extra", '{"a": {"b": 1, "c": 2}}', "--extra.a.b", "3") == {"extra": {"a": {"b": 3, "c": 2}}}


def test_an_option_that_repeats_adds_up():
    assert given("--added", "a", "--size", "2", "--added=b") == {"size": 2, "added": ["a", "b"]}


def test_lists_of_integers():
    assert given("--numbers", "4", "1") == given("--numbers", "[4, 1]") == {"numbers": [4, 1]}


def test_a_value_may_be_left_out_where_it_says_so():
    assert given("--token", "--size", "2") == {"token": True, "size": 2}
    assert given("--token", "t") == {"token": "t"}


def test_text_that_is_no_json_may_stand_for_itself():
    assert given("--place", "cuda") == {"place": "cuda"}
    assert given("--place", '{"cuda:1": "cuda:0"}') == {"place": {"cuda:1": "cuda:0"}}


def test_keys_not_given_keep_their_defaults():
    assert given("--many.inner.a", "5", "--many.mode=3") == {
        "many": {"mode": 3, "size": 1, "on": False, "inner": {"a": 5, "b": 2}}
    }


@pytest.mark.parametrize("arguments", [["-O3"], ["-O", "3"], ["--level", "3"]])
def test_optimization_levels(arguments):
    assert given(*arguments) == {"level": 3}


def test_the_last_of_a_plain_option_wins():
    assert given("--size", "1", "--size", "2") == {"size": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sise", "2"], "--sise.*did you mean --size"),
        (["--numbers", "1", "x"], "--numbers.*'x' is not an integer"),
        (["--rank", "2"], "--rank.*one of 1, 8"),
        (["--many.sise", "2"], "--many.sise.*did you mean size"),
        (["--many.size", "big"], "--many.size.*'big' is not of the type of its default, 1"),
        (["--many.size", "true"], "--many.size"),
        (["--many.inner.c", "1"], "--many.inner.c.*its keys are a, b"),
        (["--many", "[1]"], "--many.*not a JSON object"),
        (["--size"], "--size.*needs a value"),
        (["--size", "--fast"], "--size.*needs a value"),
        (["--size", "big"], "--size.*not an integer"),
        (["--size", "0"], "--size.*below 1"),
        (["--size.key", "0"], "--size.*no keys"),
        (["--color", "blue"], "--color.*red, green"),
        (["--extra", "{"], "--extra.*not JSON"),
        (["--fast=true"], "--fast.*no value"),
        (["--fast", "true"], "--fast.*no value.*--no-fast"),
        (["--quiet", "False"], "--quiet.*no value"),
        (["--size", "9" * 30], "--size.*above"),
        (["--model", ""], "--model.*is empty"),
        (["--names", "a", " "], "--names.*is empty"),
        (["--names", '["a", null]'], "--names.*None is not text"),
        (["--names", '[{"a": 1}]'], "--names.*is not text"),
        (["--numbers", "[1, true]"], "--numbers.*True is not an integer"),
        (["--model", "a\0b"], "--model.*NUL"),
        (["--extra", "[" * 100_000], "--extra.*nested more than 64"),
        (["--extra", "[" * 100 + "]" * 100], "--extra.*nested more than 64"),
        (["--extra" + ".a" * 100, "1"], "--extra.*nested more than 64"),
        (["--extra", '{"a": NaN}'], "--extra.a.*nan is not a JSON value"),
        (["--many.size", "null"], "--many.size.*None is not of the type"),
        (["--no-quiet"], "--quiet.*no negative form"),
        (["--no-size"], "--size.*no negative form"),
        (["-q", "x"], "-q.*not an option"),
        (["a", "b"], "b.*too many"),
        (["--length", "1.5K"], "--length.*fraction"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        given(*arguments)


def test_a_file_gives_values_and_the_command_line_beats_it(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("model: m\nsize: 4\nnames: [a, b]\nfast: true\nlength: 8k\nextra: {a: {b: 1}}\n")
    assert given("--config", str(file), "--size", "5") == {
        "model": "m", "size": 5, "names": ["a", "b"], "fast": True, "length": 8000, "extra": {"a": {"b": 1}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size: big", "--size"),
        ("sise: 2", "did you mean --size"),
        ("config: other", "--config"),
        ("- size", "no mapping"),
        ("a: [", "not YAML"),
        ("fast: 3", "--fast"),
        ("size: [1, 2]", "--size"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        given("--config", str(file))


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"--config: /no/such\.yaml"):
        given("--config", "/no/such.yaml")


def test_text_in_a_file_reads_like_an_argument(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("""paths: /a, /b\nnames: '["a", "b"]'\nnumbers: "3"\n""")
    assert given("--config", str(file)) == {"paths": ["/a", "/b"], "names": ["a", "b"], "numbers": [3]}


def test_a_mapping_reads_like_a_file():
    assert parse_mapping({"max_model_len": "1K", "port": 8123}, registry()) == {"max-model-len": 1024, "port": 8123}


def test_every_option_has_help_and_a_default_of_its_own_kind():
    for option in registry():
        assert option.help.endswith("."), option.name
        assert option.section
        if option.default is not None:
            assert option.from_value(option.default) == option.default


def in_file(tmp_path, text, *arguments):
    file = tmp_path / "options.yaml"
    file.write_text(text, encoding="utf-8")
    return given("--config", str(file), *arguments)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: 0123", ["0123"]),
        ("names: [1.10, 0x10, 1_000, 12:30]", ["1.10", "0x10", "1_000", "12:30"]),
        ("names: [2020-01-01]", ["2020-01-01"]),
    ],
)
def test_text_in_a_file_stays_as_it_is_written(tmp_path, text, names):
    assert in_file(tmp_path, text) == {"names": names}


def test_json_in_a_file_has_the_numbers_of_json(tmp_path):
    assert in_file(tmp_path, "extra: {a: 1e-5, b: 2020-01-01, c: 1}") == {
        "extra": {"a": 1e-5, "b": "2020-01-01", "c": 1}
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [null]", "--names.*None is not text"),
        ("names: {a: b}", "--names.*is not text"),
        ("extra: {1: 2}", "--extra.*key 1 is not text"),
        ("many: {1: 2}", "--many.*key 1 is not text"),
        ("extra: {a: {b: !!binary aGk=}}", "--extra.a.b.*is not a JSON value"),
        ("extra: {a: .inf}", "--extra.a.*is not a JSON value"),
        ("[" * 5000, "--config.*nested too deeply"),
    ],
)
def test_what_a_file_cannot_hold(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        in_file(tmp_path, text)


def test_keys_of_the_command_line_go_over_those_of_a_file(tmp_path):
    text = "extra: {a: 1, inner: {b: 2}}\nnames: [a]"
    assert in_file(tmp_path, text, "--extra.inner.c", "3", "--names", "b") == {
        "extra": {"a": 1, "inner": {"b": 2, "c": 3}},
        "names": ["b"],
    }
