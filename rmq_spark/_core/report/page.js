"use strict";
(async () => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const isNarrow = innerWidth < 520;
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const config = {
    background: null,
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: null },
    legend: { disable: true },
    axis: {
      labelColor: "var(--soft)", titleColor: "var(--soft)", gridColor: "var(--grid)",
      domainColor: "var(--line)", tickColor: "var(--line)", labelFontSize: 12, titleFontSize: 12,
      titleFontWeight: "normal", titlePadding: 8,
    },
    axisY: { domain: false, ticks: false, labelPadding: 6 },
    axisYBand: { labelColor: "var(--ink)", labelLimit: isNarrow ? 140 : 190 },
    text: { color: "var(--ink)", fontSize: 12 },
  };
  // On paper a chart is drawn anew as wide as its column: scaled down, its letters could not be read.
  const onPaper = {wide: 832, half: 388};
  const views = [];
  let drawn = 0;
  for (const [name, spec] of Object.entries(charts)) {
    const place = document.getElementById(name);
    try {
      // Half of a narrow chart is left for the values after the bars.
      if (isNarrow) for (const layer of spec.layer ?? []) layer.encoding.x.scale.domain[1] *= 1.5;
      const {view} = await vegaEmbed(place, spec, {
        actions: false, renderer: "svg", ast: true, config, tooltip: { theme: isDark ? "dark" : "light" },
      });
      views.push([view, place.closest(".wide") ? onPaper.wide : onPaper.half]);
      drawn += 1;
    } catch (problem) {
      place.textContent = "This chart cannot be drawn: " + problem.message;
      console.error(problem);
    }
  }
  addEventListener("beforeprint", () => views.forEach(([view, width]) => view.width(width).run()));
  addEventListener("afterprint", () => dispatchEvent(new Event("resize")));
  document.documentElement.dataset.drawn = String(drawn);
})();
