"""The long view as a notebook widget: the page in a frame, weights computed by the kernel on request."""

from collections.abc import Sequence
from typing import Any

from clearhead.errors import ClearheadError, MissingExtraError
from clearhead.view import page
from clearhead.view.answers import answer
from clearhead.view.container import Document
from clearhead.view.long import ShownRun

# Forwards the frame's requests to the kernel, and the kernel's replies to the frame.
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


def replied(message: Any, runs: Sequence[ShownRun]) -> tuple[dict[str, Any], list[bytes]]:
    """The kernel's reply to one request of the page: (message, buffers)."""
    try:
        return {"id": message["id"]}, [answer(message["what"], message["wanted"], runs)]
    except ClearheadError as error:
        return {"id": message["id"], "error": error.what}, []


def widget(document: Document, runs: Sequence[ShownRun]) -> Any:
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
