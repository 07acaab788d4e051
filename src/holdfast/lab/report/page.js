"use strict";
// Each pitfall can be stepped through: by its slider, its buttons, the arrow keys, or a click on a moment.
for (const pitfall of document.querySelectorAll(".pitfall")) {
  const steps = pitfall.querySelector(".steps");
  const [back, slider, output, on] = ["back", "slider", "output", "on"].map((name) => steps.querySelector("." + name));
  const words = steps.querySelector(".now-words");
  const items = [...pitfall.querySelectorAll(".story > li")];
  const drawn = [...pitfall.querySelectorAll("svg .moment")];
  const last = items.length;
  const inAll = items.filter((item) => item.querySelector(".step").textContent).length;

  function show(number) {
    slider.value = number;
    const step = items[number - 1].querySelector(".step").textContent;
    output.textContent = step ? `${step} of ${inAll}` : "–";
    slider.setAttribute("aria-valuetext", step ? `step ${step} of ${inAll}` : "time passes");
    back.disabled = number <= 1;
    on.textContent = number < last ? "Next" : "Again";
    for (const part of [...drawn, ...items]) {
      const at = Number(part.dataset.number);
      part.classList.toggle("now", at === number);
      part.classList.toggle("later", at > number);
      part.toggleAttribute("aria-current", at === number);
    }
    words.innerHTML = items[number - 1].innerHTML; // our own markup, escaped when it was written
  }

  // The controls stay in sight while the drawing scrolls behind them; so must the moment that they have chosen.
  function go(number) {
    show(number);
    const row = drawn.find((part) => Number(part.dataset.number) === number).getBoundingClientRect();
    const panel = steps.getBoundingClientRect();
    const bottom = panel.left > row.right ? innerHeight : Math.min(panel.top, innerHeight);
    if (row.bottom > bottom - 8) scrollBy(0, row.bottom - bottom + 8);
    else if (row.top < 8) scrollBy(0, row.top - 8);
  }

  const at = () => Number(slider.value);
  const next = () => go(at() < last ? at() + 1 : 1);
  const previous = () => go(Math.max(1, at() - 1));
  slider.addEventListener("input", () => go(at()));
  back.addEventListener("click", previous);
  on.addEventListener("click", next);
  for (const part of [...drawn, ...items]) part.addEventListener("click", () => show(Number(part.dataset.number)));
  pitfall.addEventListener("keydown", (event) => {
    if (event.target === slider || event.altKey || event.ctrlKey || event.metaKey || !pitfall.open) return;
    if (event.key === "ArrowRight") go(Math.min(last, at() + 1));
    else if (event.key === "ArrowLeft") previous();
    else return;
    event.preventDefault();
  });
  steps.hidden = false;
  pitfall.open = false;
  pitfall.classList.add("stepping");
  show(last);
}

// Without a script all drawings are open. With one, they open as they are asked for, and all of them for paper.
function reveal() {
  const pitfall = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!pitfall || pitfall.tagName !== "DETAILS") return;
  pitfall.open = true;
  pitfall.scrollIntoView();
}
addEventListener("hashchange", reveal);
for (const link of document.querySelectorAll("a.cell")) {
  link.addEventListener("click", () => { if (link.hash === location.hash) reveal(); });
}
addEventListener("beforeprint", () => { for (const pitfall of document.querySelectorAll(".pitfall")) pitfall.open = true; });
reveal();
