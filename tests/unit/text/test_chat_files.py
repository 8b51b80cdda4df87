"""Which files of a model folder a chat template comes from."""

import pytest

from minserve.errors import ConfigError, RequestError
from minserve.text.chat import ChatTemplate
from minserve.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}]


def test_a_template_file_beats_the_tokenizers_configuration(folder, write):
    write("tokenizer_config.json", {"chat_template": "old", "bos_token": {"content": "<s>"}})
    assert ChatTemplate.from_folder(folder).render([USER]) == "old"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}new")
    assert ChatTemplate.from_folder(folder).render([USER]) == "<s>new"
    assert ChatTemplate.from_folder(folder, override="{{ bos_token }}mine").render([USER]) == "<s>mine"


def test_a_template_for_tools_is_used_when_there_are_tools(folder, write):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write("tokenizer_config.json", {"chat_template": named})
    template = ChatTemplate.from_folder(folder)
    assert (template.render([USER]), template.render([USER], tools=TOOLS)) == ("plain", "tools")


def test_additional_template_files_have_names(folder):
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert ChatTemplate.from_folder(folder).render([USER], tools=TOOLS) == "tools"


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], [{"name": "default", "template": 5}]])
def test_a_malformed_template_entry_is_named(folder, write, value):
    write("tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ConfigError, match="chat_template must be"):
        ChatTemplate.from_folder(folder)


@pytest.mark.parametrize(
    "name",
    [
        *[
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "generation_config.json",
            "config.json",
        ],
        *["chat_template.jinja", "additional_chat_templates/tool_use.jinja"],
    ],
)
def test_no_link_leads_out_of_the_model_folder(folder, tmp_path_factory, name):
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_text("{}")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(ConfigError, match="outside the model folder"):
        _ = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b'{"a":' * 20_000 + b"1" + b"}" * 20_000])
def test_a_configuration_that_is_no_json_object_is_named(folder, content):
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_a_model_without_a_template_cannot_chat_and_says_what_to_do(folder):
    with pytest.raises(RequestError, match="--chat-template") as caught:
        ChatTemplate.from_folder(folder).render([USER])
    assert caught.value.status == 400
