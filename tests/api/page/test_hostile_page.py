"""Whatever a model says, the page shows it and does nothing else."""

import pytest
import pytest_asyncio
from playwright.async_api import expect

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPT = "window.hacked = true"

ALLOWED = {
    "P", "BR", "CODE", "PRE", "DIV", "SPAN", "BUTTON", "STRONG", "EM", "DEL", "A", "H3", "H4", "UL", "OL", "LI",
    "BLOCKQUOTE", "HR", "TABLE", "TBODY", "TR", "TH", "TD",
}  # fmt: skip

HOSTILE = {
    "script": f"<script>{SCRIPT}</script>",
    "script in code": f"```html\n</code></pre><script>{SCRIPT}</script>\n```",
    "script in a language": f"```<script>{SCRIPT}</script>\nx\n```",
    "img": f'<img src=x onerror="{SCRIPT}"><svg onload="{SCRIPT}"><iframe srcdoc="<script>{SCRIPT}</script>">',
    "img of markdown": f'![pixel](http://evil.example/p.png) ![a"onerror="{SCRIPT}](x)',
    "style": "<style>*{display:none}</style><link rel=stylesheet href=http://evil.example/a.css>",
    "style attribute": '<p style="position:fixed;inset:0;background:url(http://evil.example)">x</p>',
    "base": '<base href="http://evil.example/"><meta http-equiv="refresh" content="0;url=http://evil.example">',
    "form": '<form action="http://evil.example"><input autofocus><button>API key</button></form>',
    "javascript link": f"[a](javascript:{SCRIPT}) [b](JaVaScRiPt:{SCRIPT}) [c](java\tscript:{SCRIPT})",
    "hidden javascript link": f"[a](&#106;avascript:{SCRIPT}) [b](\x01javascript:{SCRIPT}) [c](%6aavascript:x)",
    "other schemes": "[a](data:text/html,<script>x</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x)",
    "autolinks": f"<javascript:{SCRIPT}> http://x'onmouseover='{SCRIPT} https://a\"onclick=\"{SCRIPT}",
    "nested link": f"[[a](javascript:{SCRIPT})](https://ok.example) [x]([y](javascript:{SCRIPT}))",
    "reference link": f"[a][1]\n\n[1]: javascript:{SCRIPT}",
    "attributes in a link": f'[a](https://ok.example "onclick={SCRIPT}" onclick={SCRIPT})',
    "table": f"| <script>{SCRIPT}</script> | [a](javascript:{SCRIPT}) |\n|---|---|\n| <img src=x onerror={SCRIPT}> |",
    "template": "{{constructor.constructor('window.hacked=true')()}} ${window.hacked=true} <%= 1 %>",
    "prototype": "__proto__ constructor [a](__proto__) ```constructor\n```",
}

SLOW = {
    "marks": "*a **b " * 20_000,
    "brackets": "[" * 60_000 + "](" * 20_000,
    "ticks": "`" * 30_000 + " ` `` " * 10_000,
    "quotes": ">" * 50_000,
    "lists": "\n".join(" " * (n % 40) + "- x" for n in range(5_000)),
    "lists of two kinds": "1. x\n- y\n" * 5_000,
    "paragraphs": "x\n\n" * 10_000,
    "table": "|a" * 30_000 + "\n" + "|-" * 30_000 + "\n" + "|b" * 30_000,
    "dashes": "- " * 50_000 + "x\n" + "-" * 50_000 + ":" * 50_000,
    "headings": "#" * 50_000 + " " * 50_000 + "#",
    "address": "https://" + "a.)" * 50_000,
    "spaces": "a" + " " * 100_000 + "b",
}


@pytest_asyncio.fixture(loop_scope="session")
async def say(looked):
    """say(text) -> the page, on which the model has said text, all at once."""
    running, visit = await looked(engine_options={"max_model_len": 2**20})
    running.engine.tokens_per_delta = 10**6

    async def say(text):
        running.engine.reply = text
        if await visit.page.get_by_role("button", name="New chat").is_visible():
            await visit.page.get_by_role("button", name="New chat").click()
        await visit.send("hi")
        await expect(visit.answer.get_by_role("button", name="Again")).to_be_visible()
        return visit

    return say


async def test_what_a_model_says_is_inert(say):
    for name, text in HOSTILE.items():
        visit = await say(text)
        prose = visit.answer.locator(".prose")
        inside = "element => [...element.querySelectorAll('*')]"
        tags = await prose.evaluate(f"{inside}.map(each => each.tagName)")
        assert set(tags) <= ALLOWED, name
        attributes = await prose.evaluate(f"{inside}.flatMap(each => each.getAttributeNames())")
        assert set(attributes) <= {"class", "href", "title", "target", "rel", "start", "tabindex", "type"}, name
        links = await prose.locator("a").evaluate_all("links => links.map(link => [link.protocol, link.rel])")
        assert all(kind in ("http:", "https:") for kind, _ in links), name
        assert all(rel == "noopener noreferrer nofollow" for _, rel in links), name
        for anything in await prose.locator("a, button").all():
            await anything.dispatch_event("mouseover")
        assert await visit.page.evaluate("window.hacked") is None, name
        assert await visit.page.title() == "tiny · minserve", name
        await expect(visit.page.get_by_label("Message", exact=True)).to_be_visible()


async def test_the_browser_itself_would_refuse_what_the_page_does_not_do(looked):
    _, visit = await looked()
    visit.may_fail = True
    told = await visit.page.evaluate(
        """() => {
            try { document.body.innerHTML = "<img src=x onerror='window.hacked = true'>"; return "done"; }
            catch (error) { return error.name; }
        }"""
    )
    assert told == "TypeError"
    async with visit.page.expect_event("requestfailed") as failed:
        await visit.page.evaluate(
            """() => {
                const style = document.createElement("style");
                style.textContent = "body { display: none }";
                const picture = document.createElement("img");
                picture.src = "http://evil.example/p.png";
                document.body.append(style, picture);
            }"""
        )
    assert (await failed.value).failure == "csp"
    visit.foreign.remove("http://evil.example/p.png")
    await expect(visit.page.get_by_label("Message", exact=True)).to_be_visible()


@pytest.mark.parametrize("name", SLOW)
async def test_no_text_takes_long_to_show(say, name):
    # A quadratic search would take minutes here; the browser's own layout of so long a text takes a second.
    visit = await say(SLOW[name])
    assert len(await visit.answer.locator(".prose").text_content()) > 100


async def test_markdown_is_shown_as_what_it_means(say):
    text = (
        "# Title\n\nSome *soft* and **strong** and `code`, ~~gone~~, snake_case_name, 2 * 3 * 4.\nNext line\n\n"
        "1. one\n   - inner\n2. two\n\n> quoted\n\n---\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```python\nprint('<b>')\n```\n[link](https://ok.example/a_b) https://auto.example/x, \\*plain\\*"
    )
    visit = await say(text)
    prose = visit.answer.locator(".prose")
    await expect(prose.locator("h3")).to_have_text("Title")
    await expect(prose.locator("em")).to_have_text("soft")
    await expect(prose.locator("strong")).to_have_text("strong")
    await expect(prose.locator("del")).to_have_text("gone")
    await expect(prose.locator("p code")).to_have_text("code")
    await expect(prose.get_by_text("snake_case_name, 2 * 3 * 4.")).to_have_count(1)
    await expect(prose.locator("ol > li")).to_have_count(2)
    await expect(prose.locator("ol ul > li")).to_have_text("inner")
    await expect(prose.locator("blockquote")).to_have_text("quoted")
    await expect(prose.locator("hr")).to_have_count(1)
    await expect(prose.locator("td")).to_have_text(["1", "2"])
    await expect(prose.locator("pre code")).to_have_text("print('<b>')")
    links = await prose.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert links == ["https://ok.example/a_b", "https://auto.example/x"]
    await expect(prose.get_by_text("*plain*")).to_have_count(1)
