"""The long view in a notebook with its kernel: the page in a frame, weights computed here when they are looked at."""

from collections.abc import Sequence
from typing import Any

from clearhead.errors import ClearheadError, MissingExtraError
from clearhead.view import page
from clearhead.view.answers import answer
from clearhead.view.container import Document
from clearhead.view.long import Run

# Passes on what the frame asks for and what the kernel answers.
RELAY = """
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-scripts allow-downloads";
    frame.title = "clearhead";
    frame.style.cssText = "width:100%;height:720px;border:0";
    const asked = ({ source, data }) => source === frame.contentWindow && model.send(data);
    const answered = (message, buffers) => {
      const weights = buffers.length ? new Uint8Array(buffers[0].buffer ?? buffers[0]).slice().buffer : null;
      frame.contentWindow?.postMessage({ ...message, weights }, "*");
    };
    addEventListener("message", asked);
    model.on("msg:custom", answered);
    frame.srcdoc = model.get("page");
    el.append(frame);
    return () => {
      removeEventListener("message", asked);
      model.off("msg:custom", answered);
    };
  },
};
"""


def replied(message: Any, runs: Sequence[Run]) -> tuple[dict[str, Any], list[bytes]]:
    """The kernel's answer to one request of the page: (words, buffers)."""
    try:
        return {"id": message["id"]}, [answer(message["what"], message["wanted"], runs)]
    except ClearheadError as error:
        return {"id": message["id"], "error": error.what}, []


def widget(document: Document, runs: Sequence[Run]) -> Any:
    """An anywidget that shows the document, made with served="frame". Raises MissingExtraError."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise MissingExtraError("the live view needs anywidget.", 'pip install "clearhead[notebook]"') from None

    kind = type("LongView", (anywidget.AnyWidget,), {"_esm": RELAY, "page": traitlets.Unicode().tag(sync=True)})
    made = kind(page=page.html(document))

    def received(widget: Any, message: Any, _buffers: Any) -> None:
        words, buffers = replied(message, runs)
        widget.send(words, buffers)

    made.on_msg(received)
    return made
