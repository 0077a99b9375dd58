"use strict";
// The laboratory: sliders over a table that the certified accountant filled. Every number drawn is an upper bound.
(() => {
  const table = LABORATORY_TABLE;
  const bytes = Uint8Array.from(atob(table.codes), (letter) => letter.charCodeAt(0));
  const codes = new DataView(bytes.buffer);
  const deltas = table.deltas.length;
  const width = 1 + 2 * deltas + table.fractions.length;
  const decoded = (place) => {
    const code = codes.getUint16(2 * place, true);
    return code === 0 ? 0 : table.least * Math.exp((code - 1) * table.step);
  };
  const node = (q, s, t) => {
    const first = ((q * table.noises.length + s) * table.steps.length + t) * width;
    const value = (place) => decoded(first + place);
    const advantage = Math.min(1, value(0));
    const epsilons = table.deltas.map((_, k) => value(1 + k));
    const lines = [[0, advantage]];
    table.deltas.forEach((delta, k) => lines.push([epsilons[k], Math.min(delta, 1)]));
    table.fractions.forEach((part, k) => lines.push([value(1 + deltas + k), Math.min(1, part * advantage)]));
    const tail = table.deltas.map((_, k) => [epsilons[k], value(1 + deltas + table.fractions.length + k)]);
    return { advantage, epsilons, lines, tail: tail.filter(([at, chance]) => at > 0 && chance > 0) };
  };
  // (ε, δ) bounds the true positive rate from both sides: TPR ≤ e^ε·FPR + δ, and 1 − TPR ≥ e^(−ε)(1 − δ − FPR).
  const rate = (found, fpr) =>
    found.lines.reduce(
      (best, [epsilon, delta]) =>
        Math.min(best, Math.exp(Math.min(epsilon, 700)) * fpr + delta, 1 - Math.exp(-epsilon) * (1 - delta - fpr)),
      1,
    );
  const upwards = (value, digits) => {
    if (value === 0) return "0";
    const scale = 10 ** (digits - 1 - Math.floor(Math.log10(value)));
    return Number(Math.ceil(value * scale * (1 - 1e-12)) / scale).toLocaleString("en", { maximumSignificantDigits: digits });
  };
  const power = (exponent) => `10${String(exponent).replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])}`;
  const percent = (value) => `${upwards(100 * Math.min(1, value), 3)} %`;
  const worded = (value) =>
    value < 1e-3 ? power(Math.round(Math.log10(value))) : value.toLocaleString("en", { maximumSignificantDigits: 6 });
  const element = (name, parent, text, style) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    Object.assign(made.style, style || {});
    parent.appendChild(made);
    return made;
  };
  const svg = "http://www.w3.org/2000/svg";
  const shape = (parent, name, attributes, text) => {
    const made = document.createElementNS(svg, name);
    for (const key of Object.keys(attributes)) made.setAttribute(key, attributes[key]);
    if (text) made.textContent = text;
    parent.appendChild(made);
    return made;
  };
  const nearest = (grid, value) => {
    const far = (k) => Math.abs(Math.log(grid[k] / value));
    return grid.reduce((best, _, k) => (far(k) < far(best) ? k : best), 0);
  };
  const start = (name, otherwise, value) => {
    const given = Number(value);
    return nearest(table[name], given > 0 && Number.isFinite(given) ? given : otherwise);
  };

  for (const place of document.querySelectorAll("[data-laboratory]")) {
    place.textContent = "";
    const controls = element("div", place, "", { display: "grid", gridTemplateColumns: "repeat(auto-fit, minmax(210px, 1fr))", gap: "12px 28px" });
    const sliders = {};
    const names = [
      ["rates", "sample rate q", 0.01, place.dataset.rate],
      ["noises", "noise multiplier σ", 1, place.dataset.noise],
      ["steps", "steps T", 1000, place.dataset.steps],
      ["deltas", "δ", 1e-5, place.dataset.delta],
    ];
    for (const [name, words, otherwise, given] of names) {
      const label = element("label", controls, "", { display: "block" });
      const shown = element("span", label);
      const slider = element("input", label, "", { display: "block", width: "100%", margin: "2px 0" });
      Object.assign(slider, { type: "range", min: 0, max: table[name].length - 1, step: 1 });
      slider.value = start(name, otherwise, given);
      slider.name = name;
      const say = () => {
        const value = table[name][slider.value];
        const text = worded(value);
        shown.textContent = `${words} = ${text}`;
        slider.setAttribute("aria-valuetext", text);
      };
      slider.addEventListener("input", () => {
        say();
        draw();
      });
      say();
      sliders[name] = slider;
    }
    const answer = element("p", place, "", { margin: "18px 0 10px", fontWeight: "600" });
    answer.setAttribute("role", "status");
    const charts = element("div", place, "", { display: "grid", gridTemplateColumns: "repeat(auto-fit, minmax(280px, 1fr))", gap: "20px 36px" });
    const bounds = element("p", place, "", { margin: "10px 0 0" });

    const [left, top, wide, high] = [44, 26, 300, 220];
    const axes = (title, across, upright) => {
      const chart = shape(charts, "svg", { viewBox: "0 0 360 292", role: "img", width: "100%", "font-size": 12, fill: "currentColor" });
      shape(chart, "title", {}, title);
      shape(chart, "text", { x: left, y: 14, "font-size": 13 }, upright);
      shape(chart, "text", { x: left + wide, y: top + high + 38, "text-anchor": "end" }, across);
      shape(chart, "path", { d: `M${left} ${top}V${top + high}H${left + wide}`, fill: "none", stroke: "currentColor", "stroke-opacity": 0.35 });
      return { chart, ticks: shape(chart, "g", {}), line: shape(chart, "g", { fill: "none", stroke: "currentColor", "stroke-width": 2 }) };
    };
    const tradeOff = axes("Largest true positive rate at each false positive rate", "false positive rate", "true positive rate, at most");
    const tail = axes("Probability of a privacy loss above t", "t", "P(Z > t), at most");
    const ticks = (view, across, upright) => {
      view.ticks.textContent = "";
      for (const [x, text] of across) shape(view.ticks, "text", { x: left + wide * x, y: top + high + 18, "text-anchor": "middle" }, text);
      for (const [y, text] of upright) shape(view.ticks, "text", { x: left - 6, y: top + high * (1 - y) + 4, "text-anchor": "end" }, text);
    };
    const path = (view, points, dashed) =>
      shape(view.line, "path", {
        d: points.map(([x, y], k) => `${k ? "L" : "M"}${(left + wide * x).toFixed(2)} ${(top + high * (1 - y)).toFixed(2)}`).join(""),
        ...(dashed ? { "stroke-dasharray": "4 4", "stroke-opacity": 0.4, "stroke-width": 1 } : {}),
      });

    function draw() {
      const [q, s, t, d] = names.map(([name]) => Number(sliders[name].value));
      const found = node(q, s, t);
      answer.textContent = `ε ≤ ${upwards(found.epsilons[d], 4)} at δ = ${worded(table.deltas[d])}, neighbors add or remove one`;
      tradeOff.line.textContent = "";
      path(tradeOff, [[0, 0], [1, 1]], true);
      path(tradeOff, Array.from({ length: 201 }, (_, k) => [(k / 200) ** 3, rate(found, (k / 200) ** 3)]));
      ticks(tradeOff, [0, 0.25, 0.5, 0.75, 1].map((x) => [x, String(x)]), [0, 0.5, 1].map((y) => [y, String(y)]));
      tail.line.textContent = "";
      const least = -10;
      const largest = found.tail.length ? found.tail[found.tail.length - 1][0] : 1;
      const points = found.tail.map(([at, chance]) => [at / largest, Math.max(0, 1 - Math.log10(chance) / least)]);
      if (points.length > 1) path(tail, points);
      ticks(tail, [0, 0.5, 1].map((x) => [x, upwards(x * largest, 3)]), [0, -2, -4, -6, -8, -10].map((y) => [1 - y / least, y ? power(y) : "1"]));
      bounds.textContent =
        `Membership guesses are correct in at most ${percent((1 + found.advantage) / 2)} of cases (50 % is chance). ` +
        `True positives at 1 % false positives: at most ${percent(rate(found, 0.01))}; at 0.1 %: ${percent(rate(found, 0.001))}. ` +
        `A record guessed without the model in 1 of 1,000 cases is reconstructed in at most ${percent(rate(found, 0.001))} of cases.`;
      place.dataset.epsilon = found.epsilons[d];
      place.dataset.advantage = found.advantage;
      place.dataset.found = rate(found, 0.01);
    }
    draw();
  }
})();
