//! Every report in a real browser: nothing goes wrong, tables sort, and charts tell their values to pointer and keys.
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

/// A copy of the report that tests itself, opened: its outcome.
fn outcome(browser: &Path, report: &Path, sandbox: &Sandbox) -> Value {
    let page = std::fs::read_to_string(report).unwrap();
    let copy = sandbox.write("copy.html", page.replace("</body>", SELF_TEST));
    let (dom, log) = open(browser, &copy, sandbox);
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(errors.is_empty(), "{}: {errors:?}", report.display());
    let (_, rest) =
        dom.split_once("<pre id=\"outcome\">").unwrap_or_else(|| panic!("{} did not run", report.display()));
    let text = rest.split("</pre>").next().unwrap();
    serde_json::from_str(&text.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")).unwrap()
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
        let found = outcome(&browser, &report, &sandbox);
        assert_eq!((&found["unsorted"], &found["silent"]), (&Value::Array(vec![]), &Value::Array(vec![])), "{folder}");
        let count = |name: &str| found[name].as_u64().unwrap();
        assert!(count("headings") >= headings && count("charts") >= charts, "{folder}: {found}");
    }
}
