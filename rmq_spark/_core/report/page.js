"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let views = [];

  function config() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const font = getComputedStyle(document.body).fontFamily;
    const narrow = window.innerWidth < 520;
    return {
      background: null,
      font,
      view: { stroke: null },
      legend: { disable: true },
      axis: {
        labelColor: colour("--soft"), titleColor: colour("--soft"), gridColor: colour("--grid"),
        domainColor: colour("--line"), tickColor: colour("--line"), labelFontSize: 12, titleFontSize: 12,
        titleFontWeight: "normal", titlePadding: 8,
      },
      axisY: { domain: false, ticks: false, labelPadding: 6 },
      axisYBand: { labelColor: colour("--ink"), labelLimit: narrow ? 140 : 190 },
      text: { color: colour("--ink"), fontSize: 12 },
    };
  }

  async function draw() {
    views.forEach((view) => view.finalize());
    views = [];
    let drawn = 0;
    for (const [name, spec] of Object.entries(charts)) {
      const place = document.getElementById(name);
      try {
        views.push(await vegaEmbed(place, spec, {
          actions: false, renderer: "svg", ast: true, config: config(),
          tooltip: { theme: dark.matches ? "dark" : "light" },
        }));
        drawn += 1;
      } catch (problem) {
        place.textContent = "This chart cannot be drawn: " + problem.message;
        console.error(problem);
      }
    }
    document.documentElement.dataset.drawn = String(drawn);
  }

  dark.addEventListener("change", draw);
  draw();
})();
