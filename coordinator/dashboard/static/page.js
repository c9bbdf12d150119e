// On every page: buttons that copy, and moments in the reader's own time.
"use strict";

async function copy(text) {
  // Browsers keep the clipboard's own interface for pages by TLS, and a run may be served without.
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("not copied");
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const words = button.textContent;
  try {
    await copy(document.getElementById(button.dataset.copy).textContent.trim());
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = "Selected: Ctrl-C";
  }
  setTimeout(() => { button.textContent = words; }, 2000);
});

document.addEventListener("pointerover", (event) => {
  const moment = event.target.closest?.("time[datetime]");
  if (!moment || moment.title) return;
  moment.title = new Date(moment.dateTime).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
});
