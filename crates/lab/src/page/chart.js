// Charts of lines, with the points that lie beside each as JSON: the value at the pointer or, with the chart focused, at the
// arrow keys; a button for each series; a logarithmic scale; smoothing. The sizes are those of the drawing as it comes.
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [400, 250, 52, 18, 20, 34];
const svgElement = (name, attributes, text) => {
  const element = document.createElementNS(document.querySelector("svg").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const trimmed = (x) => {
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e6) return `${x}`;
  return size < 1e-4 || size >= 1e6 ? x.toExponential(3) : `${Number(x.toPrecision(4))}`;
};

// Round numbers that cover the values, about five of them.
const linearTicks = (low, high) => {
  const span = high > low ? high - low : Math.max(Math.abs(low), 1);
  const power = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= (span / 4) * 0.999);
  const first = Math.floor(low / step), last = Math.ceil((low + span) / step);
  return Array.from({ length: last - first + 1 }, (_, n) => (first + n) * step);
};
// Powers of ten that cover the values; of few, their double and fivefold too.
const logTicks = (low, high) => {
  const of = (steps) => {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
      for (const step of steps) all.push(step * 10 ** power);
    const first = all.findLastIndex((tick) => tick <= low * 1.0001), last = all.findIndex((tick) => tick >= high * 0.9999);
    return all.slice(Math.max(0, first), last < 0 ? all.length : Math.max(last, first + 1) + 1);
  };
  const powers = of([1]);
  const ticks = powers.length > 3 ? powers : of([1, 2, 5]);
  const every = Math.ceil(ticks.length / 9);
  return ticks.filter((_, n) => n % every === 0 || n === ticks.length - 1);
};

class Chart {
  constructor(figure, data) {
    Object.assign(this, { figure, data, hidden: new Set(), log: data.log[1], smooth: false, at: null });
    this.svg = figure.querySelector(":scope > svg");
    this.plot = this.svg.querySelector(".plot");
    this.frame = data.frame;
    this.series = data.series;
    this.svg.tabIndex = 0;
    this.svg.setAttribute("aria-roledescription", "chart");
    this.switches();
    this.legend();
    this.listen();
  }

  x(value) {
    const [from, to] = this.frame, at = this.data.log[0] ? Math.log10(value) : value;
    return LEFT + ((at - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
  }

  y(value) {
    const [, , from, to] = this.frame, at = this.log ? Math.log10(value) : value;
    return HEIGHT - BOTTOM - ((at - from) / (to - from)) * (HEIGHT - TOP - BOTTOM);
  }

  written(value) {
    return this.data.percent ? `${(100 * value).toFixed(2)} %` : trimmed(value);
  }

  told({ label, raw, band }, [x, y], n) {
    const { names, x: axis, smooth } = this.data;
    const place = names[x] ?? `${smooth || axis === "step" ? `${axis} ${trimmed(x)}` : `${trimmed(x)} ${axis}`}`;
    const spread = band.find((b) => b[0] === x);
    const seeds = spread && spread[1] < spread[2] ? ` (${this.written(spread[1])} to ${this.written(spread[2])})` : "";
    const was = raw && raw[n][1] !== y ? `, smoothed; it was ${this.written(raw[n][1])}` : "";
    return `${label}, ${place}: ${this.written(y)}${seeds}${was}`;
  }

  switches() {
    const row = document.createElement("div");
    row.className = "switches";
    const add = (text, press) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        const pressed = press();
        button.setAttribute("aria-pressed", `${pressed}`);
        this.redraw();
      });
      row.append(button);
      return button;
    };
    const positive = this.data.series.every((s) => s.points.every((p) => p[1] > 0) && s.band.every((b) => b[1] > 0));
    if (positive) add("log scale", () => (this.log = !this.log)).setAttribute("aria-pressed", `${this.log}`);
    if (this.data.smooth) add("smooth", () => (this.smooth = !this.smooth));
    if (row.children.length > 0) this.svg.after(row);
  }

  legend() {
    [...this.figure.querySelectorAll(":scope > .legend li")].forEach((item, n) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(...item.childNodes);
      item.append(button);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(n)) this.hidden.add(n);
        button.setAttribute("aria-pressed", `${!this.hidden.has(n)}`);
        this.redraw();
      });
    });
  }

  // What is drawn now: a mean over past points that forgets one in twenty, corrected for where it begins.
  current() {
    const mean = (points) => {
      const keep = 1 - 1 / Math.max(2, points.length / 20);
      let sum = 0, weight = 0;
      return points.map(([x, y]) => {
        [sum, weight] = [keep * sum + (1 - keep) * y, keep * weight + 1 - keep];
        return [x, sum / weight];
      });
    };
    const smoothed = (s) => ({ ...s, raw: s.points, points: mean(s.points) });
    const series = this.data.series.filter((_, n) => !this.hidden.has(n));
    return this.smooth ? series.map((s) => (s.points.length > 3 ? smoothed(s) : s)) : series;
  }

  redraw() {
    this.leave();
    this.series = this.current();
    const values = this.series.flatMap((s) => [...(s.raw ?? s.points).map((p) => p[1]), ...s.band.flatMap((b) => [b[1], b[2]])]);
    if (values.length > 0) {
      const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      const ticks = this.log ? logTicks(low, high) : linearTicks(low, high);
      const scale = this.log ? Math.log10 : (tick) => tick;
      this.frame = [...this.data.frame.slice(0, 2), scale(ticks[0]), scale(ticks[ticks.length - 1])];
      this.grid(ticks);
    }
    this.plot.replaceChildren(...this.series.flatMap((s) => this.curve(s)));
  }

  grid(ticks) {
    const digits = Math.max(0, ...ticks.map((t) => (`${Number((this.data.percent ? 100 * t : t).toPrecision(6))}`.split(".")[1] ?? "").length));
    const label = (tick) => {
      const value = this.data.percent ? 100 * tick : tick;
      // Long rows of noughts have no room beside the axis.
      const short = value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(0) : `${Number(value.toPrecision(3))}`;
      const text = this.log || digits > 4 ? short : value.toFixed(digits);
      return this.data.percent ? `${text} %` : text;
    };
    const rows = ticks.flatMap((tick) => {
      const y = this.y(tick).toFixed(1);
      return [
        svgElement("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
        svgElement("text", { class: "tick", "text-anchor": "end", x: LEFT - 5, y: Number(y) + 3.5 }, label(tick)),
      ];
    });
    this.svg.querySelector(".scale").replaceChildren(...rows);
  }

  curve({ style, points, band, raw }) {
    const path = (all) => all.map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join(" ");
    const drawn = [];
    if (band.length > 0) {
      const outline = [...band.map((b) => [b[0], b[2]]), ...band.map((b) => [b[0], b[1]]).reverse()];
      drawn.push(svgElement("polygon", { class: `band s${style}`, points: path(outline) }));
    }
    if (raw) drawn.push(svgElement("polyline", { class: `line raw s${style}`, points: path(raw) }));
    drawn.push(svgElement("polyline", { class: `line s${style}`, points: path(points) }));
    if (this.data.marks || points.length === 1)
      for (const [x, y] of points) drawn.push(svgElement("circle", { class: `dot s${style}`, cx: this.x(x), cy: this.y(y), r: 3 }));
    return drawn;
  }

  listen() {
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect(), zoom = WIDTH / box.width;
      const [x, y] = [(event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom];
      let best = null, least = 60;
      this.series.forEach((s, line) => s.points.forEach((p, n) => {
        const distance = Math.hypot(this.x(p[0]) - x, (this.y(p[1]) - y) / 2);
        if (distance < least) [best, least] = [[line, n], distance];
      }));
      if (best) this.point(...best);
      else this.leave();
    });
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return this.leave();
      const [line, n] = this.at ?? [0, -1], last = (this.series[line]?.points.length ?? 0) - 1;
      const to = {
        ArrowRight: [line, n + 1], ArrowLeft: [line, n - 1], Home: [line, 0], End: [line, last],
        ArrowDown: [line + 1, n], ArrowUp: [line - 1, n],
      }[event.key];
      if (!to || this.series.length === 0) return undefined;
      event.preventDefault();
      return this.point(...to);
    });
  }

  point(line, n) {
    line = Math.max(0, Math.min(this.series.length - 1, line));
    const series = this.series[line];
    if (series.points.length === 0) return;
    n = Math.max(0, Math.min(series.points.length - 1, n));
    this.leave();
    this.at = [line, n];
    const [x, y] = series.points[n];
    this.here = svgElement("circle", { class: `here s${series.style}`, cx: this.x(x), cy: this.y(y), r: 4 });
    this.plot.append(this.here);
    showTip(this.here, this.told(series, series.points[n], n));
  }

  leave() {
    this.here?.remove();
    this.at = null;
    tip.hidden = true;
  }
}
for (const figure of document.querySelectorAll("figure.chart")) {
  new Chart(figure, JSON.parse(figure.querySelector(":scope > script").textContent));
}
