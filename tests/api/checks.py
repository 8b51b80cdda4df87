"""What the tests of bad input share."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"


async def refused(running, path, body, param, *words):
    """The request is refused with a 400 that names param and says words, and reaches no engine."""
    status, answer = await running.post(path, body)
    error = answer["error"]
    assert status == 400, answer
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"]
    assert not running.engine.submits


def completion_body(**fields):
    return {"prompt": "Say"} | fields
