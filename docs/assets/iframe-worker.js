// Search works in pages that are opened from the folder: browsers start no worker there, so its
// script runs in a hidden frame, which takes and gives messages as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      this.waiting = []
      const load = (...urls) => urls.reduce((before, one) => before.then(() => new Promise(done => {
        const script = this.inner.document.createElement("script")
        script.src = one
        script.onload = done
        this.inner.document.body.appendChild(script)
      })), Promise.resolve())
      this.inner.importScripts = load
      this.inner.postMessage = data => {
        const message = new MessageEvent("message", { data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      }
      load(url).then(() => {
        this.ready = true
        for (const data of this.waiting) this.deliver(data)
      })
    }
    deliver(data) { this.inner.dispatchEvent(new MessageEvent("message", { data })) }
    postMessage(data) { this.ready ? this.deliver(data) : this.waiting.push(data) }
    terminate() {}
  }
}
