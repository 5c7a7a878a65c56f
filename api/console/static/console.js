"use strict";
// A part that loads itself again waits while somebody works in it, and while nobody sees the page.
document.addEventListener("htmx:beforeRequest", (event) => {
  const part = event.target.closest("[data-pauses]");
  if (part && (document.hidden || part.contains(document.activeElement) || String(getSelection()))) event.preventDefault();
});
