//! The report of a benchmark.

use maud::{Markup, html};
use resolvent_kernels::Mechanism;

use crate::{
    bench::{BenchReport, Crossover, Pass, Point, Timing, milliseconds, three_digits},
    environment::Load,
    page::{
        self,
        chart::{self, Axes, Series},
    },
};

/// The page of a benchmark.
pub fn bench_page(report: &BenchReport) -> String {
    let BenchReport { batch, heads, head_dim, rounds, ceilings, .. } = report;
    let arrangement = report.arrangement.to_string();
    let title = "Attention mechanisms against the number of tokens";
    let body = html! {
        h1 { (title) }
        p class="quiet" {
            "Calls of " (batch) " sequence" @if *batch != 1 { "s" } ", " (heads) " heads of " (head_dim)
            " channels, tensors of f32 where nothing else is said" @if !arrangement.is_empty() { "; " (arrangement) } ". Medians of " (rounds) " turns; the mechanisms of one size take turns."
        }
        p class="verdict" { (report.headline()) }
        @if let Some(load) = report.load.filter(Load::is_busy) { p { strong { "Warning. " } (capitalised(&load.to_string())) "." } }
        @if report.interrupted { p { strong { "Note. " } "Stopped before all sizes were measured." } }
        (page::tiles(&[
            ("matrix product, GFLOP/s", format!("{:.0}", ceilings.gemm_gflops)),
            ("exponentials, 10^9/s", format!("{:.1}", ceilings.exp_giga)),
            ("memory copy, GB/s", format!("{:.1}", ceilings.copy_gbs)),
        ]))
        @for check in report.checks.iter().chain(&report.rivals).filter(|check| !check.passed) {
            p { strong { "Note. " } (check) }
        }
        h2 { "Time" }
        div class="charts" { @for &pass in Pass::ALL { (curves(report, pass)) } }
        h2 { "Faster than softmax" }
        (crossovers(report))
        (against_rivals(report))
        @for &pass in Pass::ALL {
            h2 { (capitalised(pass.name())) }
            div class="scroll" { (table(report, pass)) }
        }
        h2 { "How calls are carried out" }
        dl { @for (label, point) in report.measured() { @if let Some(how) = point.carried_out() { dt { (label) } dd { (how) (tiles(point)) } } } }
        h2 { "Against the f64 reference" }
        ul { @for check in report.checks.iter().chain(&report.rivals) { li { (check) } } }
        (left_out(report))
        (page::environment(&report.environment, "generated, unit variance", &report.commands))
        p class="quiet" { "Timed are the fused kernels. In modules: " (report.auto()) "." }
        p class="quiet" {
            "Peak memory is what a call holds beyond its tensors and results: scratch, statistics and lists of ours, all temporaries "
            "of a rival. GFLOP/s are products and sums alone, over the median time; their share is that of the rate at which the "
            "gemm crate multiplies large matrices here. Exponentials (a logarithm or a root counts as one) and planned bytes have "
            "shares of their own. Mechanisms that end an iteration when it has converged have no rate."
        }
    };
    page::shell(title, &body)
}

fn tiles(point: &Point) -> String {
    point.plan.as_ref().map_or(String::new(), |plan| format!("; tiles of {} x {}", plan.tile.0, plan.tile.1))
}

fn curves(report: &BenchReport, pass: Pass) -> Markup {
    // Rivals of the others are in the tables: twenty lines are no picture.
    let drawn = |label: &&str| report.rivals().all(|(rival, of)| rival != *label || Some(of) == report.baseline());
    let series: Vec<_> = report
        .labels()
        .into_iter()
        .filter(drawn)
        .map(|label| Series::line(label, style_of(report, label), report.curve(label, pass)))
        .filter(|series| !series.points.is_empty())
        .collect();
    let title = format!("Seconds, {pass}");
    chart::log_lines(Axes { title: &title, x: "tokens", y: "s", percent: false }, &series)
}

fn crossovers(report: &BenchReport) -> Markup {
    let from = |tokens: &Option<f64>| match *tokens {
        None => "not within these sizes".into(),
        Some(n) if report.sizes().first().is_some_and(|&least| n <= least as f64) => "at every size".to_owned(),
        Some(n) => format!("from about {} tokens", page::count(n.round() as usize)),
    };
    let all = report.crossovers();
    let row = |crossover: &Crossover| {
        html! {
            th scope="row" { (chip(report, &crossover.label)) (crossover.label) }
            @for tokens in [crossover.forward, crossover.training] { td data-value=[tokens] { (from(&tokens)) } }
        }
    };
    html! {
        @if all.is_empty() { p class="quiet" { "Nothing to compare: softmax, or all others, were not measured." } } @else {
        div class="scroll" { (page::table(["Mechanism"].into_iter().chain(Pass::ALL.iter().map(|pass| pass.name())), all.iter().map(row))) }
        }
    }
}

/// Something measured of a point.
type Quantity = fn(&Point) -> Option<f64>;

/// How many times as fast as each rival, and how many times its memory over ours.
fn against_rivals(report: &BenchReport) -> Markup {
    let sizes = report.sizes();
    let cells = |rival: &str, quantity: Quantity| {
        let ratio = |&n: &usize| report.ratio(rival, n, quantity);
        sizes.iter().map(ratio).map(|ratio| ratio.map_or("–".into(), three_digits)).collect::<Vec<_>>()
    };
    let tables: [(&str, Quantity); 4] = [
        ("Time, forward", |p| Some(p.forward.as_ref()?.median)),
        ("Time, forward + backward", |p| Some(p.training.as_ref()?.median)),
        ("Peak memory, forward", |p| Some(p.forward.as_ref()?.peak_bytes? as f64)),
        ("Peak memory, forward + backward", |p| Some(p.training.as_ref()?.peak_bytes? as f64)),
    ];
    let row = |(rival, of): (&str, &str), quantity| {
        html! {
            th scope="row" { (chip(report, rival)) (rival) }
            td { (of) }
            @for cell in cells(rival, quantity) { td { (cell) } }
        }
    };
    let headings: Vec<String> =
        ["Rival", "of"].map(String::from).into_iter().chain(sizes.iter().map(|&n| page::count(n))).collect();
    html! {
        @if report.rivals().next().is_some() {
            h2 { "Rivals over ours" }
            p class="quiet" { "How many times our time, and our memory, a rival takes: above 1, ours is better." @if let Some(peer) = &report.peer { " Frameworks in a process of their own: " (peer) "." } }
            @for (title, quantity) in tables {
                h3 { (title) }
                div class="scroll" { (page::table(&headings, report.rivals().map(|names| row(names, quantity)))) }
            }
        }
    }
}

fn table(report: &BenchReport, pass: Pass) -> Markup {
    let columns = [
        "Mechanism",
        "Tokens",
        "ms",
        "spread",
        "tokens/s",
        "GFLOP/s",
        "of matrix product",
        "of exponentials",
        "of copy",
        "peak memory",
        "planned",
    ];
    let mut ranked: Vec<_> = report.points.iter().filter_map(|point| Some((point, pass.of(point)?))).collect();
    ranked.sort_by(|a, b| a.0.tokens.cmp(&b.0.tokens).then(a.1.median.total_cmp(&b.1.median)));
    let row = |(point, timing): (&Point, &Timing)| {
        html! {
            th scope="row" { (chip(report, &point.label)) (point.label) }
            td { (page::count(point.tokens)) }
            td { strong { (milliseconds(timing.median)) } }
            td { (milliseconds(timing.low)) " – " (milliseconds(timing.high)) }
            td { (page::count(timing.tokens_per_second.round() as usize)) }
            td { @if timing.gflops > 0.0 { (format!("{:.1}", timing.gflops)) } @else { "–" } }
            @for share_of in [timing.gemm_share, timing.exp_share, timing.copy_share] { td { (share(share_of)) } }
            td { (timing.peak_bytes.map_or("–".into(), page::megabytes)) }
            td { (planned(point, pass)) }
        }
    };
    page::table(columns, ranked.into_iter().map(row))
}

/// A share in per cent; a dash where there is none.
fn share(share: f64) -> String {
    if share > 0.0 { format!("{:.0} %", share * 100.0) } else { "–".into() }
}

fn planned(point: &Point, pass: Pass) -> String {
    let bytes = point.plan.as_ref().map(|plan| match pass {
        Pass::Forward => plan.forward_bytes,
        Pass::Training => plan.training_bytes,
    });
    bytes.map_or("–".into(), page::megabytes)
}

fn left_out(report: &BenchReport) -> Markup {
    let skipped: Vec<_> = report.points.iter().filter(|point| point.skipped.is_some()).collect();
    html! {
        @if !skipped.is_empty() {
            h2 { "Left out" }
            ul { @for point in skipped { li { (point) } } }
        }
    }
}

fn chip(report: &BenchReport, label: &str) -> Markup {
    html! { span class=(format!("chip s{}", style_of(report, label))) {} }
}

/// As [`page::style_of`]; the rivals of softmax, which are drawn together, are told apart by theirs.
fn style_of(report: &BenchReport, label: &str) -> usize {
    const RIVALS: usize = 5;
    let mut rivals = report.rivals().filter(|(_, of)| Some(*of) == report.baseline());
    let ours: Vec<&str> = report.ours().collect();
    if let Some(at) = ours.iter().position(|own| *own == label) {
        let id = |label: &&str| report.points.iter().find(|p| p.label == *label)?.mechanism.as_ref().map(Mechanism::id);
        return page::style_among(&ours.iter().map(|own| id(own).unwrap_or_default()).collect::<Vec<_>>(), at);
    }
    page::style_of(label) + rivals.position(|(rival, _)| rival == label).unwrap_or(0) % RIVALS
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
