//! Every report in a real browser: nothing goes wrong, tables sort, charts tell their values to pointer and keys, and pages fit narrow and
//! wide screens and paper, in light and dark, with words that stand out from what is behind them.
//! Browsers are not everywhere: run it with `cargo test --release --workspace --test browser -- --ignored`.

mod support;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use serde_json::Value;
use support::{Sandbox, Tensors, tiny};

const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// What is done to a page once its own script has run; the outcome is left in the page.
const SELF_TEST: &str = r##"<script>
"use strict"; {
const number = (cell) => Number.parseFloat((cell.dataset.value ?? cell.textContent).replace(/\u2009/g, ""));
const outcome = { headings: 0, unsorted: [], charts: 0, silent: [] };
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    outcome.headings += 1;
    for (const order of ["ascending", "descending"]) {
      heading.querySelector("button").click();
      const all = [...table.tBodies[0].rows].map((row) => number(row.cells[column]));
      const numbers = all.filter(Number.isFinite), sign = order === "ascending" ? 1 : -1;
      const sorted = numbers.every((x, at) => at === 0 || sign * (x - numbers[at - 1]) >= 0);
      const last = all.slice(0, numbers.length).every(Number.isFinite);
      if (heading.getAttribute("aria-sort") !== order || !sorted || !last) outcome.unsorted.push(heading.textContent);
    }
  });
}
const tip = document.querySelector(".tip");
const press = (chart, key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
for (const chart of document.querySelectorAll("figure:not(.chart) > svg")) {
  const points = [...chart.querySelectorAll(".dot")].filter((point) => point.querySelector("title"));
  if (points.length === 0) continue;
  outcome.charts += 1;
  const told = (point) => !tip.hidden && tip.textContent === point.querySelector("title").textContent;
  points[0].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  const hovered = told(points[0]);
  press(chart, "End");
  const reached = told(points[points.length - 1]);
  press(chart, "Escape");
  if (!hovered || !reached || !tip.hidden) outcome.silent.push(chart.getAttribute("aria-label"));
}
for (const figure of document.querySelectorAll("figure.chart")) {
  outcome.charts += 1;
  const chart = figure.querySelector(":scope > svg"), name = chart.getAttribute("aria-label");
  const { series } = JSON.parse(figure.querySelector(":scope > script").textContent);
  const drawn = () => [...chart.querySelectorAll(".plot polyline:not(.raw)")].map((line) => line.getAttribute("points"));
  const check = (what, holds) => { if (!holds) outcome.silent.push(`${name}: ${what}`); };
  // Keys reach both ends of a line, the pointer finds what it is over.
  press(chart, "Home");
  const first = tip.textContent, box = chart.querySelector(".here").getBoundingClientRect();
  check("its first point", !tip.hidden && first.startsWith(`${series[0].label}, `));
  press(chart, "Escape");
  check("Escape", tip.hidden && !chart.querySelector(".here"));
  const [clientX, clientY] = [box.left + box.width / 2, box.top + box.height / 2];
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
  check("the pointer", !tip.hidden && chart.querySelector(".here"));
  press(chart, "Escape");
  // Switches change what is drawn and no more than that; a series that is hidden comes back.
  const before = drawn();
  for (const button of figure.querySelectorAll(".switches button")) {
    const pressed = button.getAttribute("aria-pressed");
    button.click();
    const changed = drawn();
    check(`${button.textContent} is told`, button.getAttribute("aria-pressed") !== pressed);
    check(`${button.textContent} is drawn`, changed.length === before.length && !/NaN|Infinity/.test(changed.join()));
    button.click();
  }
  const legend = [...figure.querySelectorAll(":scope > .legend button")];
  check("its legend", legend.length === (series.length > 1 ? series.length : 0));
  if (legend.length > 0) {
    legend[0].click();
    check("a series hidden", drawn().length === before.length - 1 && legend[0].getAttribute("aria-pressed") === "false");
    legend[0].click();
  }
  check("what was there", drawn().length === before.length);
  check("no picture", chart.getAttribute("role") !== "img");
  check("its table", figure.querySelectorAll(":scope > details tbody tr").length > 0);
}
const left = document.createElement("pre");
left.id = "outcome";
left.textContent = JSON.stringify(outcome);
document.body.append(left);
}
</script></body>"##;

/// How a page is looked at: a name, and pixels across. The last is A4 paper within its margins.
const LOOKS: [(&str, u32); 5] = [("light", 400), ("dark", 400), ("light", 1280), ("dark", 1280), ("print", 688)];

/// What a page in a frame tells the page around it, everything in it unfolded: how it looks, by how many pixels it or, in print, a table is wider than
/// its place, and words whose contrast with what is behind them is below 4.5, as in the "Web Content Accessibility Guidelines", 1.4.3.
const LAYOUT: &str = r##"<script>
"use strict"; {
const look = location.hash.slice(1), root = document.documentElement;
root.style.colorScheme = look === "dark" ? "dark" : "light";
const media = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).filter((rule) => rule instanceof CSSMediaRule);
for (const { media: list } of media) {
  const set = (holds) => { list.mediaText = holds ? "all" : "not all"; };
  if (list.mediaText === "print") set(look === "print");
  else if (list.mediaText.includes("dark")) set(look === "dark");
  else if (look === "print") set(false);
}
for (const details of document.querySelectorAll("details")) details.open = true;
const channels = (colour) => {
  const [red, green, blue, alpha = 1] = colour.match(/-?[\d.]+(e-\d+)?/g).map(Number);
  const scale = colour.startsWith("color(") ? 1 : 1 / 255;
  return [red * scale, green * scale, blue * scale, alpha];
};
const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
const behind = (element) => {
  if (!element) return [1, 1, 1, 1];
  const own = channels(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, behind(element.parentElement));
};
const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
const luminance = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
const faint = new Set();
for (const element of document.body.querySelectorAll("*")) {
  const words = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && node.data.trim() !== "");
  if (words.length === 0 || element.matches("script, style, title") || !element.checkVisibility()) continue;
  const style = getComputedStyle(element), ground = behind(element);
  const ink = over(channels(element instanceof SVGElement ? style.fill : style.color), ground);
  const [light, dark] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
  const contrast = (light + 0.05) / (dark + 0.05);
  if (contrast < 4.5) faint.add(`${element.localName}.${element.getAttribute("class")} ${words[0].data.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
}
// Paper does not scroll: there no table may be wider than its place either.
const places = look === "print" ? [root, ...document.querySelectorAll(".scroll, pre")] : [root];
const wider = Math.max(...places.map((place) => place.scrollWidth - place.clientWidth));
const beyond = (element) => !element.closest("svg") && element.getBoundingClientRect().right > root.clientWidth + 1;
const where = wider > 0 ? [...document.querySelectorAll("main *")].filter(beyond).map((element) => `${element.localName}.${element.className}`) : [];
parent.postMessage({ look: `${look} ${innerWidth}`, ground: getComputedStyle(document.body).backgroundColor, wider, where: where.slice(0, 5), faint: [...faint].slice(0, 10) }, "*");
}
</script></body>"##;

/// The page around the frames.
const FRAMES: &str = r##"<!DOCTYPE html><html><body><script>
const outcome = [];
addEventListener("message", ({ data }) => {
  outcome.push(data);
  if (outcome.length < FRAMES) return;
  const left = document.createElement("pre");
  left.id = "outcome";
  left.textContent = JSON.stringify(outcome);
  document.body.append(left);
});
</script>"##;

fn browser() -> PathBuf {
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap()).collect();
    let mut paths = BROWSERS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    paths
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("no browser (any of {}) on the path", BROWSERS.join(", ")))
}

/// The page as the browser has it in the end, and what it logged.
fn open(browser: &Path, page: &Path, sandbox: &Sandbox) -> (String, String) {
    let [dom, log] = ["dom", "log"].map(|name| sandbox.path(name));
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"])
        .args(["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"])
        .arg(format!("--user-data-dir={}", sandbox.path("profile").display()))
        .args(["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("file://{}", page.display()))
        .stdout(std::fs::File::create(&dom).unwrap())
        .stderr(std::fs::File::create(&log).unwrap());
    let mut child = command.spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(120) {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{} does not come up here", browser.display());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let [dom, log] = [dom, log].map(|file| String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned());
    assert!(dom.contains("<html"), "{} does not come up here: {log}", browser.display());
    (dom, log)
}

/// What `page`, a file of the sandbox, left in itself when it was opened to show `report`.
fn outcome(browser: &Path, page: &Path, report: &Path, sandbox: &Sandbox) -> Value {
    let (dom, log) = open(browser, page, sandbox);
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(errors.is_empty(), "{}: {errors:?}", report.display());
    let (_, rest) =
        dom.split_once("<pre id=\"outcome\">").unwrap_or_else(|| panic!("{} did not run", report.display()));
    let text = rest.split("</pre>").next().unwrap();
    serde_json::from_str(&text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")).unwrap()
}

/// A copy of the report that does `what` when it is opened.
fn copy(report: &Path, what: &str, sandbox: &Sandbox) -> PathBuf {
    let page = std::fs::read_to_string(report).unwrap();
    sandbox.write("copy.html", page.replace("</body>", what))
}

/// Checks that the report fits every look, and that its words can be read in it.
fn fits(browser: &Path, report: &Path, sandbox: &Sandbox) {
    copy(report, LAYOUT, sandbox);
    let frame = |(look, width): (&str, u32)| {
        format!("<iframe src=\"copy.html#{look}\" style=\"width:{width}px;height:900px;border:0\"></iframe>")
    };
    let frames = FRAMES.replace("FRAMES", &LOOKS.len().to_string()) + &LOOKS.map(frame).concat() + "</body></html>";
    let page = sandbox.write("frames.html", frames);
    let found = outcome(browser, &page, report, sandbox);
    let found = found.as_array().unwrap();
    for (look, width) in LOOKS {
        let name = format!("{look} {width}");
        let page = found.iter().find(|page| page["look"] == name[..]);
        let page = page.unwrap_or_else(|| panic!("{}: no look {name}: {found:?}", report.display()));
        let ground = if look == "dark" { "rgb(20, 23, 27)" } else { "rgb(255, 255, 255)" };
        assert_eq!(page["ground"], ground, "{}: {name}", report.display());
        let problems = (page["wider"].as_i64().unwrap(), page["faint"].as_array().unwrap().len());
        assert_eq!(problems, (0, 0), "{}: {page}", report.display());
    }
}

#[test]
#[ignore = "needs a browser"]
fn reports_work_in_a_browser() {
    let browser = browser();
    let sandbox = tiny::sandbox();
    sandbox.write("dump.safetensors", Tensors::call(&[2, 2, 24, 8]).file());
    sandbox.run(&["analyze", "--input", "dump.safetensors", "--full", "--out", "analysis", "--quiet"]).success();
    sandbox.run(&tiny::train("run", &["--attention", "infsa", "--quiet"])).success();
    sandbox.run(&["explain", "--checkpoint", "run", "--examples", "4", "--out", "maps", "--quiet"]).success();
    let compare = ["compare", "--config", "tiny.toml", "--data", tiny::DATA, "--out", "all", "--quiet"];
    sandbox.run(&[&compare[..], &["--mechanisms", "softmax,uniform"]].concat()).success();
    let sizes = ["--tokens", "16,24", "--heads", "1", "--head-dim", "4", "--rounds", "1", "--out", "bench", "--quiet"];
    sandbox.run(&[&["bench"][..], &sizes].concat()).success();
    // How many headings and charts each has at least.
    for (folder, headings, charts) in
        [("analysis", 60, 4), ("run", 0, 2), ("maps", 9, 1), ("all", 5, 1), ("bench", 5, 1)]
    {
        let report = sandbox.path(folder).join("report.html");
        let page = copy(&report, SELF_TEST, &sandbox);
        let found = outcome(&browser, &page, &report, &sandbox);
        assert_eq!((&found["unsorted"], &found["silent"]), (&Value::Array(vec![]), &Value::Array(vec![])), "{folder}");
        let count = |name: &str| found[name].as_u64().unwrap();
        assert!(count("headings") >= headings && count("charts") >= charts, "{folder}: {found}");
        fits(&browser, &report, &sandbox);
    }
}
