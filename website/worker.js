// A browser lets no page of a folder start a worker, and the search of the theme is one. Here the search runs in a frame
// of the page instead. The theme would load such a script from elsewhere; website/hooks.py puts this one in its place.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((loaded) => {
        const script = inside.document.createElement("script");
        script.src = address;
        script.onload = loaded;
        inside.document.body.append(script);
      });
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
