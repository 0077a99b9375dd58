"use strict";
// A chart carries its points as [x, y, words] in drawing units; the pointer and the arrow keys read the nearest one.
for (const chart of document.querySelectorAll("svg[data-points]")) {
  const points = JSON.parse(chart.dataset.points);
  const figure = chart.closest("figure");
  const readout = figure && figure.querySelector(".readout");
  if (!points.length || !readout) continue;
  const shape = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key of Object.keys(attributes)) node.setAttribute(key, attributes[key]);
    chart.appendChild(node);
    return node;
  };
  const box = chart.viewBox.baseVal;
  const cross = shape("line", { class: "cross", y1: 26, y2: box.height - 40, visibility: "hidden" });
  const mark = shape("circle", { class: "mark", r: 4.5, visibility: "hidden" });
  let at = -1;
  const show = (place) => {
    at = Math.max(0, Math.min(points.length - 1, place));
    const [x, y, words] = points[at];
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    mark.setAttribute("cx", x);
    mark.setAttribute("cy", y);
    cross.setAttribute("visibility", "visible");
    mark.setAttribute("visibility", "visible");
    readout.textContent = words;
  };
  const hide = () => {
    cross.setAttribute("visibility", "hidden");
    mark.setAttribute("visibility", "hidden");
    readout.textContent = readout.dataset.hint;
  };
  chart.addEventListener("pointermove", (event) => {
    const area = chart.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * box.width;
    const y = ((event.clientY - area.top) / area.height) * box.height;
    let best = 0;
    for (let k = 1; k < points.length; k++) {
      const far = (p) => 16 * Math.abs(p[0] - x) + Math.abs(p[1] - y);
      if (far(points[k]) < far(points[best])) best = k;
    }
    show(best);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at + step);
  });
  readout.dataset.hint = "Point at the curve, or use the arrow keys, to read it.";
  readout.textContent = readout.dataset.hint;
}
for (const bar of document.querySelectorAll(".views")) {
  const figure = bar.closest("figure");
  bar.hidden = false;
  for (const button of bar.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      for (const other of bar.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      for (const view of figure.querySelectorAll("[data-view]")) view.hidden = view.dataset.view !== button.dataset.show;
    });
  }
}
document.documentElement.dataset.ready = "yes";
