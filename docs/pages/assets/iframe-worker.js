// Browsers start no worker for a page opened from disk. There the search runs in a hidden frame
// instead: the same messages, in the page's own thread.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.window = frame.contentWindow;
      // What the worker sends goes to its owner, not back to the frame's own listeners.
      this.window.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.window.document.createElement("script");
      this.ready = new Promise((done) => script.addEventListener("load", done));
      script.src = url;
      this.window.document.head.append(script);
    }

    postMessage(data) {
      this.ready.then(() =>
        this.window.dispatchEvent(new this.window.MessageEvent("message", { data })),
      );
    }
  };
}
