"use strict";
// A part that loads itself again waits while somebody works in it, and while nobody sees the page.
document.addEventListener("htmx:beforeRequest", (event) => {
  const part = event.target.closest("[data-pauses]");
  if (part && (document.hidden || part.contains(document.activeElement) || String(getSelection()))) event.preventDefault();
});
// A page that can't be followed says so.
for (const [name, isLost] of [["htmx:sendError", true], ["htmx:responseError", true], ["htmx:afterOnLoad", false]])
  document.addEventListener(name, () => (document.getElementById("lost").hidden = !isLost));
// What was opened stays open.
document.addEventListener("htmx:beforeSwap", (event) => {
  const open = [...event.target.querySelectorAll("details[open][id]")].map((one) => one.id);
  if (open.length) event.target.addEventListener("htmx:afterSwap", () => open.forEach((id) => document.getElementById(id)?.setAttribute("open", "")), { once: true });
});
// The slider through a stream's versions: the state after each is in its row.
document.addEventListener("DOMContentLoaded", () => {
  const slider = document.getElementById("version");
  const rows = [...document.querySelectorAll("#history tr[data-version]")].filter((row) => row.querySelector(".state"));
  if (!slider || rows.length < 2) return;
  const show = () => {
    const now = rows[slider.value];
    rows.forEach((row) => row.classList.toggle("at", row === now));
    document.getElementById("at").value = now.dataset.version;
    document.getElementById("then").textContent = now.querySelector(".state").textContent;
    slider.setAttribute("aria-valuetext", `version ${now.dataset.version}`);
  };
  slider.min = 0;
  slider.max = rows.length - 1;
  slider.value = rows.length - 1;
  slider.addEventListener("input", show);
  document.getElementById("travel").hidden = false;
  show();
});
