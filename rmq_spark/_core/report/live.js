"use strict";
(() => {
  const places = (main) => [...main.querySelectorAll("a, summary, [tabindex]")];
  let answered = Date.now();

  function mayReplace() {
    return !document.hidden && getSelection().isCollapsed;
  }

  async function look() {
    const main = document.querySelector("main");
    const every = Number(main.dataset.every);
    if (every && mayReplace()) {
      try {
        const answer = await fetch(location.href, {cache: "no-store"});
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        if (fresh && mayReplace()) {
          const focused = places(main).indexOf(document.activeElement);
          for (const list of main.querySelectorAll("details[open]")) {
            fresh.querySelector(`details#${list.id}`)?.setAttribute("open", "");
          }
          main.replaceWith(fresh);
          if (focused >= 0) places(fresh)[focused]?.focus({preventScroll: true});
        }
        answered = Date.now();
        document.body.classList.remove("old");
      } catch {
        const seconds = Math.round((Date.now() - answered) / 1000);
        document.body.classList.add("old");
        document.getElementById("note").textContent =
          `txmq serve has not answered for ${seconds} s: it has ended, or the way to it is cut. What you see is old.`;
      }
    }
    setTimeout(look, 1000 * (every || 5));
  }

  setTimeout(look, 1000 * Number(document.querySelector("main").dataset.every || 5));
})();
