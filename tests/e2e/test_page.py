"""The page at / and the docs in a browser: Debian's Chromium without a window, against the fake engine and SmolLM2.

The fake engine echoes what it reads, so that a test can have it answer anything.
"""

import asyncio
import base64
import io
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from PIL import Image

from engine.embedded.whisper import reader
from multimodal.speech import transcriber
from tests.routers.test_tools import CALL, THINKING, WEATHER
from tests.routers.test_transcriptions import ReaderHere, wav
from tests.support.servers import ServerThread, serving
from tests.support.waiting import slowness
from tests.support.whisper_models import build_whisper

pytest.importorskip("playwright", reason="Playwright is not installed")
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Locator, Page, async_playwright, expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
"""The shell has no windows to manage, and takes two thirds of the processor time."""
if CHROMIUM is None:
    pytest.skip("Chromium is not installed: apt-get install chromium-headless-shell", allow_module_level=True)
pytestmark = pytest.mark.asyncio(loop_scope="module")
SECONDS = 30 * slowness()
WIDE = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 800}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=SECONDS * 1e3)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"],
        )
        yield browser
        await browser.close()


class Tab:
    """A tab of the page: what a person does, what it sent, and what went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.sent: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.elsewhere: list[str] = []
        page.set_default_timeout(SECONDS * 1e3)
        page.on("request", self._note)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._listen)
        page.on("dialog", self.refuse)
        self.write = page.get_by_label("Message", exact=True)
        self.answers = page.locator(".answer")

    async def open(self, path: str = "/") -> None:
        await self.page.goto(self.url + path)

    def _note(self, request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.sent.append(request.post_data_json)
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def _listen(self, message: Any) -> None:
        # Chromium reports answers that are no success, of which the page tells by itself, and servers that have
        # ended, as these do before their tabs close.
        expected = ("the server responded with a status", "ERR_CONNECTION_REFUSED")
        if message.type in ("error", "warning") and not any(text in message.text for text in expected):
            self.faults.append(message.text)

    async def refuse(self, dialog: Any) -> None:
        self.faults.append(f"a dialog: {dialog.message}")
        await dialog.dismiss()

    async def say(self, text: str) -> None:
        """Send a message and wait for the end of the answer."""
        await self.write.fill(text)
        await self.button("Send").click()
        await expect(self.write).to_have_value("")
        await self.settled()

    async def settled(self) -> None:
        """Wait for the end of the answer that is shown last."""
        await expect(self.answers.last).to_have_attribute("aria-busy", "false")
        await expect(self.button("Send")).to_be_visible()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def field(self, name: str) -> Locator:
        return self.page.get_by_label(name, exact=True)

    async def set(self, **values: str) -> None:
        for name, value in values.items():
            await self.page.evaluate(
                "document.querySelectorAll('#settings details').forEach((one) => (one.open = true))"
            )
            field = self.field(name)
            if await field.evaluate("(element) => element.tagName") == "SELECT":
                await field.select_option(value)
            else:
                await field.fill(value)

    async def listing(self, tab: str) -> str:
        """The text that is copied from a tab of what is behind the last answer."""
        await self.page.get_by_role("tab", name=tab, exact=True).last.click()
        panel = self.page.get_by_role("tabpanel").last
        await panel.get_by_role("button").click()
        await expect(panel.get_by_role("button")).to_have_text("Copied")
        text = await self.page.evaluate("navigator.clipboard.readText()")
        assert isinstance(text, str)
        return text


@pytest_asyncio.fixture(loop_scope="module")
async def opened(browser: Browser) -> AsyncIterator[Any]:
    """Opens pages that share nothing. At the end none has failed or asked another server."""
    tabs: list[Tab] = []

    async def open_tab(url: str, path: str = "/", **options: Any) -> Tab:
        context = await browser.new_context(
            **{
                "viewport": WIDE,
                "reduced_motion": "reduce",
                "permissions": ["clipboard-read", "clipboard-write"],
                **options,
            }
        )
        tabs.append(tab := Tab(await context.new_page(), url))
        await tab.open(path)
        return tab

    yield open_tab
    for tab in tabs:
        await tab.page.context.close()
    for tab in tabs:
        assert (tab.faults, tab.elsewhere) == ([], [])


async def test_answers_branch_and_are_kept(opened: Any) -> None:
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="30", logprobs="true")
        await tab.say("one two three")
        await expect(tab.answers).to_contain_text("one two")
        figures = " ".join(await tab.page.locator(".figures div").all_inner_texts())
        for name in ("first token", "tokens/s", "tokens\n30", "prompt", "cached", "end\nlength"):
            assert name in figures
        assert tab.sent[0]["messages"] == [{"role": "user", "content": "one two three"}]
        assert tab.sent[0]["max_tokens"] == 30 and tab.sent[0]["model"] == "fake"

        await tab.button("Regenerate").click()
        await expect(tab.page.get_by_text("2/2")).to_be_visible()
        await tab.settled()
        await tab.button("Edit").click()
        await tab.page.get_by_label("Edit the message").fill("four five six")
        await tab.page.keyboard.press("Enter")
        await expect(tab.page.get_by_label("Edit the message")).to_have_count(0)
        await tab.settled()
        await expect(tab.answers).to_contain_text("four five")
        assert tab.sent[2]["messages"] == [{"role": "user", "content": "four five six"}]
        await tab.say("and then?")
        assert [message["role"] for message in tab.sent[3]["messages"]] == ["user", "assistant", "user"]

        await tab.button("Branch before").first.click()
        await expect(tab.page.locator(".user")).to_have_count(1)
        await tab.page.reload()
        await tab.page.get_by_role("navigation").get_by_text("one two three").click()
        await expect(tab.page.locator(".user")).to_have_text(re.compile("one two three"))
        await expect(tab.page.get_by_text("2/2")).to_be_visible()
        await tab.button("Next branch").first.click()
        await expect(tab.page.locator(".user").last).to_have_text(re.compile("and then?"))


async def test_stop_ends_the_request_and_keeps_what_came(opened: Any) -> None:
    with ServerThread(fake_token_delay_ms=20) as server:
        tab: Tab = await opened(server.url)
        for stop in (tab.button("Stop").click, lambda: tab.page.keyboard.press("Escape")):
            await tab.write.fill("again and again")
            await tab.button("Send").click()
            await expect(tab.button("Stop")).to_be_visible()
            await expect(tab.answers.last).to_contain_text("again and")
            assert server.replica.running == 1
            await stop()
            await expect(tab.answers.last).to_contain_text("Stopped.")
            await expect(tab.answers.last).to_contain_text("again and")
            async with httpx.AsyncClient() as client:  # the engine has nothing left to do
                while (
                    'trtllm_num_requests_running{model_name="fake"} 0.0'
                    not in (await client.get(f"{server.url}/metrics")).text
                ):
                    pass


async def test_a_deleted_chat_stays_deleted_and_a_closed_one_stops(opened: Any) -> None:
    with ServerThread(fake_token_delay_ms=20) as server:
        tab: Tab = await opened(server.url)
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await tab.write.fill("again and again")
        await tab.button("Send").click()
        await expect(tab.answers).to_contain_text("again and")
        await tab.page.reload()
        await tab.page.get_by_role("navigation").get_by_text("again and again").click()
        await expect(tab.answers).to_contain_text("Stopped.")
        await tab.button("Regenerate").click()
        await expect(tab.answers).to_contain_text("again and")
        tab.page.remove_listener("dialog", tab.refuse)
        tab.page.on("dialog", lambda dialog: dialog.accept())
        await tab.button("Delete again and again").click()
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await tab.page.reload()
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await expect(tab.page.get_by_role("navigation").get_by_role("listitem")).to_have_count(0)


async def test_copying_without_tls(opened: Any) -> None:
    """Another machine's browser has no `navigator.clipboard` there."""
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="30")
        await tab.say("hello")
        await tab.page.evaluate("Object.defineProperty(navigator, 'kept', { value: navigator.clipboard })")
        await tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        await tab.button("Copy").first.click()
        await expect(tab.button("Copied")).to_be_visible()
        assert await tab.page.evaluate("navigator.kept.readText()") == "hello"


async def test_two_answers_side_by_side(opened: Any) -> None:
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="5")
        await tab.field("Two answers side by side").check()
        await tab.set(max_tokens="9", **{"System prompt": "You are B."})
        await tab.say("hello there")
        await expect(tab.answers).to_have_count(2)
        assert sorted((body["max_tokens"], body["messages"][0]["role"]) for body in tab.sent) == [
            (5, "user"),
            (9, "system"),
        ]
        await tab.button("Go on with this one").click()
        chosen = tab.page.locator(".answer.chosen")
        await expect(chosen.locator(".name")).to_have_text("B")
        text = await chosen.locator(".markdown").inner_text()
        await tab.field("Two answers side by side").uncheck()
        await tab.say("and you?")
        assert tab.sent[2]["messages"][1]["content"].split() == text.split() and tab.sent[2]["max_tokens"] == 5


async def test_choices_of_one_request_stand_side_by_side(opened: Any) -> None:
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="4", n="3")
        await tab.say("hello")
        assert await tab.page.locator(".name").all_inner_texts() == ["A1", "A2", "A3"]
        assert len(tab.sent) == 1


async def test_every_supported_field_is_offered_and_sent(opened: Any) -> None:
    with ServerThread() as server:
        async with httpx.AsyncClient(timeout=SECONDS) as client:
            document = (await client.get(f"{server.url}/openapi.json")).json()
        properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        ours = {"model", "messages", "stream", "stream_options", "max_completion_tokens", "request_id"}
        guides = {"response_format", "structured_outputs"}
        wanted = {
            name
            for name, schema in properties.items()
            if ("type" in schema or "anyOf" in schema) and name not in ours | guides
        }
        assert {"temperature", "top_k", "stop", "logit_bias", "seed", "priority", "cache_salt"} < wanted
        tab: Tab = await opened(server.url)
        await expect(tab.field("temperature")).to_be_visible()
        offered = await tab.page.locator("#settings [id^=field-]").evaluate_all("(all) => all.map((one) => one.id)")
        assert {name.removeprefix("field-") for name in offered} == wanted

        await tab.set(
            max_tokens="6",
            temperature="0.25",
            stop="first\nsecond",
            stop_token_ids="3, 4",
            logit_bias='{"5": -1.5}',
            ignore_eos="true",
            cache_salt="mine",
            logprobs="false",
        )
        await tab.say("hello")
        expected = {
            "max_tokens": 6,
            "temperature": 0.25,
            "stop": ["first", "second"],
            "stop_token_ids": [3, 4],
            "logit_bias": {"5": -1.5},
            "ignore_eos": True,
            "cache_salt": "mine",
            "logprobs": False,
            "top_p": 0.95,
        }
        assert {name: tab.sent[0].get(name) for name in expected} == expected and "top_logprobs" not in tab.sent[0]
        for values, problem in (
            ({"temperature": "3"}, "temperature must be at most 2"),
            ({"temperature": "warm"}, "temperature must be a number"),
            ({"temperature": "1", "seed": "1.5"}, "seed must be a whole number"),
            ({"seed": "", "logit_bias": "{"}, "logit_bias is not JSON"),
        ):
            await tab.set(**values)
            await tab.write.fill("hello")
            await expect(tab.page.locator(".composer .error")).to_contain_text(problem)
            await expect(tab.button("Send")).to_be_disabled()
        await tab.button("Reset all").click()
        await expect(tab.button("Send")).to_be_enabled()


async def test_reasoning_and_calls_are_shown_and_sent_back(opened: Any, tmp_path: Path) -> None:
    """The first answer is stopped while it reasons, the second calls a tool, the others follow the tool's result."""
    script = tmp_path / "script.json"
    script.write_text(
        json.dumps(["think " * 1000, f"Hm, **Paris**.</think>{CALL}", "Good.</think>Sunny.", "Bad.</think>Rainy."])
    )
    template = tmp_path / "template.jinja"
    template.write_text(THINKING)
    with ServerThread(fake_script=script, chat_template=template, fake_token_delay_ms=20) as server:
        tab: Tab = await opened(server.url)
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await tab.set(tools=json.dumps([WEATHER]))
        await tab.write.fill("Think.")
        await tab.button("Send").click()
        reasoning = tab.answers.last.locator("details.reasoning")
        await expect(reasoning.locator(".markdown")).to_contain_text("think think")
        await expect(reasoning).to_have_attribute("open", "")
        await tab.button("Stop").click()
        await expect(tab.answers).to_contain_text("Stopped.")

        await tab.say("How is Paris?")
        stopped = tab.sent[1]["messages"][1]
        assert (stopped["role"], stopped["content"]) == ("assistant", "")
        assert stopped["reasoning_content"].startswith("think think")
        await expect(reasoning).not_to_have_attribute("open", "")
        await reasoning.locator("summary").click()
        await expect(reasoning.locator("strong")).to_have_text("Paris")
        call = tab.answers.last.locator(".call")
        await expect(call.locator("figcaption")).to_have_text("Calls get_weather")
        assert await call.locator("pre").inner_text() == '{\n  "city": "Paris"\n}'
        await check_accessible(tab.page)

        await tab.field("Result of get_weather").fill("18 °C")
        await tab.button("Send results").click()
        await expect(tab.answers.last).to_contain_text("Sunny.")
        await tab.settled()
        asked, result = tab.sent[2]["messages"][-2:]
        function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        identity = result["tool_call_id"]
        assert asked == {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm, **Paris**.",
            "tool_calls": [{"id": identity, "type": "function", "function": function}],
        }
        assert identity and result == {
            "role": "tool",
            "tool_call_id": identity,
            "name": "get_weather",
            "content": "18 °C",
        }

        await tab.page.reload()
        await tab.page.get_by_role("navigation").get_by_text("Think.").click()
        results = tab.page.get_by_label("Results of tools")
        await expect(results).to_contain_text("18 °C")
        await check_accessible(tab.page)
        await results.get_by_role("button", name="Edit").click()
        await tab.field("Result of get_weather").fill("3 °C")
        await tab.button("Send as a branch").click()
        await expect(tab.answers.last).to_contain_text("Rainy.")
        await tab.settled()
        await expect(results).to_contain_text("2/2")
        assert tab.sent[3]["messages"][-1]["content"] == "3 °C"


async def test_images_come_by_button_drop_and_paste(opened: Any, tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    file = tmp_path / "red.png"
    file.write_bytes(picture.getvalue())
    encoded = base64.b64encode(picture.getvalue()).decode()
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await tab.field("Attach files").set_input_files(file)
        for kind, event, name, target in (
            ("drop", "DragEvent", "dataTransfer", "document.body"),
            ("paste", "ClipboardEvent", "clipboardData", "document.querySelector('.composer textarea')"),
        ):
            await tab.page.evaluate(
                f"""(encoded) => {{
                    const data = new DataTransfer();
                    const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
                    data.items.add(new File([bytes], "red.png", {{ type: "image/png" }}));
                    {target}.dispatchEvent(new {event}("{kind}", {{ {name}: data, bubbles: true, cancelable: true }}));
                }}""",
                encoded,
            )
        await expect(tab.page.locator(".attached img")).to_have_count(3)
        await tab.button("Remove image 2").click()
        await expect(tab.page.locator(".attached img")).to_have_count(0)  # all three are the same picture
        await tab.field("Attach files").set_input_files(file)
        await tab.set(max_tokens="60")
        await tab.say("What is this?")
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        content = tab.sent[0]["messages"][0]["content"]
        assert content == [part, {"type": "text", "text": "What is this?"}]
        await expect(tab.answers).to_contain_text("What is this?")
        await expect(tab.page.locator(".bubble img")).to_be_visible()
        clip = tmp_path / "clip.mp4"
        clip.write_bytes(b"\0\0\0\x18ftypisom" + bytes(64))
        await tab.field("Attach files").set_input_files(clip)
        await expect(tab.page.locator(".attached video")).to_have_count(1)
        await tab.say("And this?")
        part = tab.sent[1]["messages"][-1]["content"][0]
        assert part["type"] == "video_url" and part["video_url"]["url"].startswith("data:video/mp4;base64,")


async def test_pictures_and_videos_are_made(opened: Any, tmp_path: Path) -> None:
    pytest.importorskip("av")
    with ServerThread(modality="visual", cache_dir=tmp_path, fake_token_delay_ms=20) as server:
        tab: Tab = await opened(server.url)
        made = tab.page.locator(".made img")
        await tab.set(size="32x16", seed="7", quality="hd")
        await tab.write.fill("a red circle")
        await tab.button("Draw").click()
        await expect(made).to_have_js_property("naturalWidth", 32)
        await expect(tab.page.locator(".figures")).to_contain_text("seed7")
        async with tab.page.expect_download() as download:
            await tab.page.get_by_role("link", name="Download").click()
        assert (await download.value).suggested_filename == "picture-1.png"
        await tab.button("Attach").click()
        await tab.set(size="33x16")
        await tab.write.fill("blue")
        await tab.button("Draw").click()
        await expect(tab.answers.last.get_by_role("alert")).to_contain_text("multiples of 8")
        await tab.set(size="")
        await tab.button("Regenerate").last.click()
        await expect(made.nth(1)).to_have_js_property("naturalWidth", 32)  # as large as the one to change
        await expect(tab.button("Draw")).to_be_visible()
        await tab.button("Inspect").last.click()
        assert "images/edits" in (curl := await tab.listing("curl"))
        assert "--form-string 'prompt=blue'" in curl
        await check_accessible(tab.page)

        await tab.field("Task").select_option("video")
        await tab.set(num_inference_steps="200")
        for prompt in ("a long one", "a square"):
            await tab.write.fill(prompt)
            await tab.button("Make video").click()
            await expect(tab.page.get_by_role("progressbar")).to_be_visible()
            if prompt == "a long one":
                await tab.button("Stop").click()
                await expect(tab.answers.last).to_contain_text("Stopped.")
                await tab.set(num_inference_steps="20")
        await expect(tab.page.locator(".made video")).to_have_js_property("readyState", 4)
        async with httpx.AsyncClient() as client:
            jobs = (await client.get(f"{server.url}/v1/videos")).json()["data"]
        assert [job["status"] for job in jobs] == ["completed", "cancelled"]
        await expect(tab.page.locator(".strip")).to_contain_text("steps/s")
        await tab.page.reload()
        await tab.page.get_by_role("navigation").get_by_text("a red circle").click()
        await expect(tab.page.locator(".made video")).to_have_js_property("readyState", 4)


async def test_recordings_are_written_down(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tiny Whisper model, which writes nonsense; the second recording is of Chromium's beeping microphone."""
    monkeypatch.setattr(reader, "HostedReader", ReaderHere)
    for name, value in (("LEAST_LOGPROB", -100.0), ("MOST_COMPRESSION", 100.0)):
        monkeypatch.setattr(transcriber, name, value)
    speech = tmp_path / "speech.wav"
    speech.write_bytes(wav(3.0))
    whisper: dict[str, Any] = {"engine": "embedded", "model": str(build_whisper(tmp_path / "whisper")), "threads": 1}
    with ServerThread(**whisper, max_transcription_seconds=20) as server:
        tab: Tab = await opened(server.url, permissions=["microphone"])
        await expect(tab.button("Transcribe")).to_be_disabled()
        await tab.field("Attach files").set_input_files(speech)
        await tab.button("Transcribe").click()
        await expect(tab.page.locator(".plain")).to_have_text(re.compile(r"\S"))
        await tab.set(response_format="srt")
        await tab.button("Record").click()
        await expect(tab.button("Record")).to_have_attribute("aria-pressed", "true")
        await tab.page.wait_for_timeout(500)
        await tab.button("Record").click()
        await expect(tab.page.locator(".attached audio")).to_have_count(1)
        await tab.button("Transcribe").click()
        await expect(tab.page.locator(".plain").last).to_contain_text("-->")
        clip = tmp_path / "clip.mp4"
        clip.write_bytes(bytes(64))
        await tab.field("Attach files").set_input_files(clip)
        await expect(tab.page.locator(".composer .error")).to_contain_text("does not take clip.mp4 (video/mp4)")


async def test_inspect_shows_tokens_and_commands_of_an_answer(opened: Any) -> None:
    """The copied commands run, and give the same answer."""
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="10", min_tokens="2", **{"System prompt": 'It\'s "quoted" $HOME `x`\nEOF'})
        await tab.say("tell me\nEOF\n'more'")
        await tab.button("Inspect").click()
        tokens = tab.page.locator(".tokens").get_by_role("option")
        await expect(tokens).to_have_count(10)
        await expect(tokens.first).to_have_attribute("data-heat", re.compile(r"\d"))
        await tokens.nth(3).click()
        await expect(tab.page.locator(".heat caption")).to_contain_text("Token 4 of 10")
        await tab.page.get_by_role("listbox").press("ArrowRight")
        await expect(tab.page.locator(".heat caption")).to_contain_text("Token 5 of 10")
        await expect(tab.page.locator(".heat .taken")).to_contain_text("%")

        assert json.loads(await tab.listing("Request")) == tab.sent[0]
        events = [json.loads(line.split(" ms  ")[1]) for line in (await tab.listing("Events")).splitlines()]
        texts = [choice["delta"].get("content") for event in events for choice in event["choices"]]
        text = "".join(filter(None, texts))
        assert text and events[-1]["usage"]["completion_tokens"] == 10

        assert await output(sys.executable, "-c", await tab.listing("Python")) == text + "\n"
        if shutil.which("curl"):
            lines = (await output("bash", "-c", await tab.listing("curl"))).splitlines()
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert [chunk["choices"] for chunk in chunks] == [event["choices"] for event in events]


async def output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd="/")
    async with asyncio.timeout(SECONDS):
        printed, _ = await process.communicate()
    return printed.decode()


async def test_the_key_stays_in_the_tab(opened: Any) -> None:
    with ServerThread(api_keys=("a-secret-key",)) as server:
        tab: Tab = await opened(server.url)
        await tab.field("This server needs an API key.").fill("wrong")
        await tab.button("Connect").click()
        await tab.field("The server does not know this API key.").fill("a-secret-key")
        await tab.button("Connect").click()
        await tab.set(max_tokens="30")
        await tab.say("hello")
        await expect(tab.answers).to_contain_text("hello")
        await tab.button("Inspect").click()
        for name in ("Request", "curl", "Python"):
            assert "a-secret-key" not in await tab.listing(name)
        assert "a-secret-key" not in await tab.page.evaluate("JSON.stringify(localStorage) + document.cookie")
        await tab.page.reload()
        await expect(tab.button("Key")).to_be_visible()  # it survives that
        other = Tab(await tab.page.context.new_page(), server.url)
        await other.open()
        await expect(other.field("This server needs an API key.")).to_be_visible()
        await tab.open("/docs")
        await expect(tab.page.get_by_text("Create a chat completion")).to_be_visible()


async def test_docs_ask_for_a_key_and_try_requests_with_it(opened: Any) -> None:
    with ServerThread(api_keys=("a-secret-key",)) as server:
        tab: Tab = await opened(server.url, "/docs")
        for key in ("wrong", "a-secret-key"):
            await tab.field("This server needs an API key.").fill(key)
            await tab.button("Show the API").click()
            if key == "wrong":
                await expect(tab.page.get_by_role("alert")).to_have_text("The server does not know this key.")
        await tab.page.get_by_text("Version of the server").click()
        await tab.page.get_by_role("button", name="Try it out").click()
        await tab.page.get_by_role("button", name="Execute").click()
        await expect(tab.page.locator(".live-responses-table td.response-col_status").last).to_contain_text("200")


async def test_answers_cannot_run_scripts_or_ask_other_servers(opened: Any) -> None:
    attack = (
        '<img src=x onerror="alert(1)"> ![a](http://192.0.2.1/a.png) <script>alert(2)</script> '
        '<a href="javascript:alert(3)">here</a> <svg onload="alert(4)"></svg> '
        '<style>@import "http://192.0.2.1/b";</style> '
        '<form action="http://192.0.2.1/"><button>send</button></form>'
    )
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="400", temperature="0")
        await tab.say(attack)
        inside = tab.answers.locator(".markdown")
        await expect(inside.locator("a").first).to_have_attribute("rel", "noopener noreferrer")
        for forbidden in ("script", "[onerror]", "[onload]", "form", "style", 'a[href^="javascript"]'):
            await expect(inside.locator(forbidden)).to_have_count(0)
        # The policy stops images of other servers. Chromium also reports handlers that DOMPurify read and removed.
        assert any("192.0.2.1/a.png" in fault for fault in tab.faults)
        assert all("Content Security Policy" in fault for fault in tab.faults), tab.faults
        tab.faults.clear()
        tab.elsewhere = [url for url in tab.elsewhere if not url.endswith("a.png")]  # which never left


async def test_live_figures(opened: Any) -> None:
    """Of an engine, and of a router with its replicas."""
    with ServerThread(fake_token_delay_ms=20) as replica:
        tab: Tab = await opened(replica.url)
        strip = tab.page.locator(".strip")
        await expect(strip).to_contain_text("aggregated")
        await tab.set(max_tokens="1000")
        await tab.write.fill("again and again")
        await tab.button("Send").click()
        await expect(strip).to_contain_text("1 running")
        await expect(strip).to_contain_text(re.compile(r"[1-9][0-9.]* tokens/s"))
        await expect(strip).to_contain_text("KV cache")
        await tab.button("Stop").click()
        await expect(strip).to_contain_text("0 running")
        await strip.click()
        await expect(tab.page.get_by_role("img", name="Tokens/s: ")).to_be_visible()
        await expect(tab.page.locator(".plot canvas")).to_have_count(3)

        with ServerThread(disaggregation_mode="router", route_urls=(replica.url,)) as router:
            tab = await opened(router.url)
            await expect(tab.page.locator(".strip")).to_contain_text("router")
            await expect(tab.page.locator(".strip")).to_contain_text("1/1 replicas")
            await tab.page.locator(".strip").click()
            await expect(tab.page.locator("#charts table")).to_contain_text("available")
            await tab.set(max_tokens="30")
            await tab.say("hello")
            await expect(tab.answers).to_contain_text("hello")


@pytest.mark.parametrize(("size", "colours"), [(WIDE, "dark"), (PHONE, "light")], ids=["wide-dark", "phone-light"])
async def test_the_page_is_accessible(opened: Any, colours: str, size: dict[str, int]) -> None:
    with ServerThread() as server:
        tab: Tab = await opened(server.url, viewport=size, color_scheme=colours)
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await check_accessible(tab.page)
        if size is PHONE:
            await expect(tab.page.locator("#settings")).not_to_be_visible()
            await tab.button("Settings").click()
            await expect(tab.page.locator("#settings")).to_be_visible()
        await tab.set(max_tokens="20")
        await tab.field("Two answers side by side").check()
        await tab.set(max_tokens="20")
        await check_accessible(tab.page)
        if size is PHONE:
            await tab.page.keyboard.press("Escape")
            await expect(tab.page.locator("#settings")).not_to_be_visible()
        await tab.say("# A title\n\n- [x] done\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")
        await tab.page.locator(".strip").click()
        await tab.button("Inspect").first.click()
        for name in ("Tokens", "Request", "Events", "curl", "Python"):
            await tab.page.get_by_role("tab", name=name).first.click()
            await check_accessible(tab.page)
        width = await tab.page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"], "nothing makes the page scroll sideways"


async def check_accessible(page: Page) -> None:
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


async def test_the_keyboard_suffices(opened: Any) -> None:
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="6")
        await tab.write.focus()
        await tab.page.keyboard.type("first")
        await tab.page.keyboard.press("Shift+Enter")
        await tab.page.keyboard.type("second")
        await tab.page.keyboard.press("Enter")
        await expect(tab.write).to_have_value("")
        await tab.settled()
        assert tab.sent[0]["messages"][0]["content"] == "first\nsecond"
        await tab.button("Inspect").press("Enter")
        await tab.page.get_by_role("tab", name="Tokens").press("ArrowRight")
        await expect(tab.page.get_by_role("tab", name="Request")).to_be_focused()
        await tab.page.keyboard.press("Alt+n")
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await expect(tab.write).to_be_focused()
        await tab.button("Colours: auto").press("Enter")
        await tab.button("Colours: light").press("Enter")
        await expect(tab.page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_a_server_that_goes_away_and_comes_back(opened: Any) -> None:
    with ServerThread() as server:
        tab: Tab = await opened(server.url)
        await expect(tab.page.get_by_text("Talk to fake")).to_be_visible()
        await tab.page.context.set_offline(True)
        await expect(tab.page.locator(".health")).to_have_text("The server cannot be reached.")
        await tab.say("hello")
        await expect(tab.answers.get_by_role("alert")).to_have_text("The server cannot be reached.")
        await tab.page.context.set_offline(False)
        await expect(tab.page.locator(".health")).to_have_count(0)
        await tab.set(max_tokens="30")
        await tab.button("Regenerate").click()
        await expect(tab.answers).to_contain_text("hello")
        tab.faults = [fault for fault in tab.faults if "ERR_INTERNET_DISCONNECTED" not in fault]


@pytest.mark.timeout(600)
async def test_smollm2(opened: Any, smollm2: Path) -> None:
    flags = ("--engine", "embedded", "--engine-process", "false", "--model", "smollm2-135m-instruct")
    with serving(*flags) as server:
        tab: Tab = await opened(server.url)
        await tab.set(max_tokens="24", temperature="0")
        await tab.say("What is the capital of France?")
        await expect(tab.answers).to_contain_text("Paris")
        await tab.say("And of Italy?")
        figures = await tab.page.locator(".figures").last.inner_text()
        cached = re.search(r"cached\s+(\d+)", figures)
        assert cached is not None and int(cached[1]) > 0, "the chat so far is not computed again"
        await tab.page.get_by_label("Structured output").select_option("regex")
        await tab.page.get_by_role("textbox", name="Regular expression").fill("(yes|no), [0-9]{3}")
        await tab.button("New chat").click()
        await tab.say("Is water wet?")
        assert tab.sent[-1]["response_format"] == {"type": "regex", "regex": "(yes|no), [0-9]{3}"}
        await expect(tab.answers.locator(".markdown")).to_have_text(re.compile(r"^(yes|no), \d{3}\s*$"))
        await tab.button("Inspect").click()
        heat = await tab.page.locator(".tokens span").evaluate_all("(all) => all.map((one) => one.dataset.heat)")
        assert len(set(heat)) > 1, "tokens differ in colour"
