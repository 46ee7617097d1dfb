"""A chat template that never ends or fills memory is refused before a rank starts; others are left to the rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli.program import main
from toolkit.data.formats import Sample
from toolkit.data.template_limits import check_templates, templates_of
from toolkit.errors import ToolkitError

CHAT = Sample(messages=[{"role": "user", "content": "Hej"}, {"role": "assistant", "content": "Hello"}])
NESTED_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = {
    "nested loops": NESTED_LOOPS,
    "an operation in C, which no signal handler interrupts": "{{ 2 ** (10 ** 9) }}",
    "only for the words of a row": "{% for m in messages if m.content == 'Hej' %}" + NESTED_LOOPS + "{% endfor %}",
}


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_that_never_ends_is_refused(template: str) -> None:
    with pytest.raises(ToolkitError, match=r"^the template: it takes more than 1 s to render one conversation"):
        check_templates([template], [CHAT], name="the template")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 10**10 }}", "it takes more memory than any conversation"),
        ("{% set x = 'x' * 10**6 %}{% for a in range(99) %}{{ x }}{% endfor %}", "it renders one conversation as more"),
        ("{% for %}", "line 1: Expected an expression, got 'end of statement block'"),
        ("a\n{{ x|nope }}", "line 2: No filter named 'nope'."),
        ("{{" + "(" * 50_000 + ")" * 50_000 + "}}", "it cannot be compiled: RecursionError"),
    ],
)
def test_a_template_that_is_malformed_or_fills_memory_is_refused(template: str, message: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        check_templates(["{{ messages[0].content }}", template], [CHAT], name="the template")
    assert caught.value.message.startswith(f"the template: {message}")
    assert "--chat_template FILE" in str(caught.value.hint)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ tools | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ namespace(a=1).a }}",
        "{{ bos_token + eos_token }}",  # the rank's tokenizer knows them
        "{{ raise_exception('no tools') }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox refuses it, in the rank too
        "{% include '/etc/passwd' %}",
    ],
)
def test_what_depends_on_the_tokenizer_and_the_rows_is_left_to_the_rank(template: str) -> None:
    check_templates([template], [CHAT], name="the template")


def test_every_template_of_a_model_is_found(tmp_path: Path) -> None:
    assert templates_of(tmp_path) == []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a", "model_max_length": 10**30}))
    assert templates_of(tmp_path) == ["a"]
    named = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}, {"name": "x"}, 5]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "e.jinja").write_text("e")
    assert templates_of(tmp_path) == ["d", "e", "b", "c"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat.jsonl"], "the chat template of model: it takes more than 1 s"),
        (["chat.jsonl", "--chat_template", "bad.jinja"], "bad.jinja: line 1: Expected an expression"),
        (["chat.jsonl", "--chat_template", "none.jinja"], "no such file: none.jinja"),
        (["text.jsonl"], ""),
    ],
    ids=str,
)
def test_a_job_with_such_a_template_is_refused_before_it_is_launched(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name, text in {
        **{"model/config.json": "{}", "model/chat_template.jinja": NESTED_LOOPS, "bad.jinja": "{% for %}"},
        **{"chat.jsonl": json.dumps({"messages": CHAT.messages}), "text.jsonl": '{"text": "plain"}'},
    }.items():
        Path(name).write_text(text)
    job = ["--model_name_or_path", "model", "--per_device_train_batch_size", "1", "--output_dir", "out", "--dataset"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--cpu", "--preset", "ddp", "--num-processes", "1", "--dry-run", "--", *job, *words])
    printed = capsys.readouterr().err
    assert ended.value.code == (2 if message else 0), printed
    assert printed.startswith(f"error: {message}" if message else "")
