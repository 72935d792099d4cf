//! Sources in which every mutant stands behind a switch.

use std::ops::Range;

use crate::find::{Form, Mutant};

/// The module that the switches ask. `MUTANT` numbers the one that is on; `MUTANTS_REACHED` names a file to which the number
/// of each one is appended as it is first reached.
pub const MODULE: &str = r#"//! Which mutant is on, and which were reached.

use std::{
    io::Write,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
};

static ACTIVE: AtomicU32 = AtomicU32::new(u32::MAX);
static REACHED: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

#[inline(always)]
pub fn on(mutant: u32) -> bool {
    if !REACHED[mutant as usize].load(Relaxed) {
        reach(mutant);
    }
    ACTIVE.load(Relaxed) == mutant
}

#[cold]
#[inline(never)]
fn reach(mutant: u32) {
    if let Some(active) = std::env::var("MUTANT").ok().and_then(|active| active.parse().ok()) {
        ACTIVE.store(active, Relaxed);
    }
    if !REACHED[mutant as usize].swap(true, Relaxed) && let Some(path) = std::env::var_os("MUTANTS_REACHED") {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(format!("{mutant}\n").as_bytes()).unwrap();
    }
}
"#;

/// `text` with the numbered `mutants`, all of this file.
pub fn switched(text: &str, mutants: &[(usize, &Mutant)]) -> String {
    let mut sorted = mutants.to_vec();
    // The outer before the inner.
    sorted.sort_by_key(|(_, mutant)| (mutant.range.start, std::cmp::Reverse(mutant.range.end)));
    render(text, 0..text.len(), &sorted)
}

/// The bytes `within` of `text`, with the `mutants` that lie in them.
fn render(text: &str, within: Range<usize>, mutants: &[(usize, &Mutant)]) -> String {
    let (mut out, mut at, mut left) = (String::new(), within.start, mutants);
    while let [(id, mutant), rest @ ..] = left {
        let Range { start, end } = mutant.range;
        let (inside, after) =
            rest.split_at(rest.iter().take_while(|(_, m)| m.range.end <= end && m.range.start < end).count());
        out += &text[at..start];
        // What is left as it is keeps its own mutants; the change takes the plain text: one mutant is on at a time.
        out += &switch(*id, mutant, &render(text, start..end, inside));
        (at, left) = (end, after);
    }
    out + &text[at..within.end]
}

fn switch(id: usize, mutant: &Mutant, original: &str) -> String {
    let changed = &mutant.changed;
    let switch = match mutant.form {
        Form::Expression => format!("(if crate::mutant::on({id}) {{ {changed} }} else {{ {original} }})"),
        Form::Statement => format!("if crate::mutant::on({id}) {{ {changed} }} else {{ {original} }}"),
        Form::Body => format!("if crate::mutant::on({id}) {{ {changed} }} {original}"),
    };
    format!("{}{switch}{}", open(id), close(id))
}

fn open(id: usize) -> String {
    format!("/*<{id}*/")
}

fn close(id: usize) -> String {
    format!("/*{id}>*/")
}

/// The innermost of `ids` around the bytes `at` of a switched text.
pub fn around(switched: &str, at: &Range<usize>, ids: &[usize]) -> Option<usize> {
    let range = |&id: &usize| Some((switched.find(&open(id))?..switched.find(&close(id))?, id));
    let holding = ids.iter().filter_map(range).filter(|(range, _)| range.start <= at.start && at.end <= range.end);
    holding.min_by_key(|(range, _)| range.len()).map(|(_, id)| id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::in_text;

    const TEXT: &str = "
        const TILE: usize = 4 * 16;
        fn nested(a: usize, b: usize) -> bool {
            let mut x = a + b * 2;
            x += [0; 8].len();
            if a.min(b) < 3 { x.push(1) }
            unsafe { a + b };
            !(x == b)
        }
        #[cfg(test)]
        mod tests { fn left() -> usize { 1 + 1 } }
        fn work(n: usize) -> usize { 2 * n }
    ";

    #[test]
    fn every_change_is_found_once_and_nothing_is_changed_elsewhere() {
        let mutants = in_text("f.rs", TEXT).unwrap();
        let changes = mutants.iter().map(Mutant::change).collect::<Vec<_>>();
        let expected = [
            "fn nested -> return true;",
            "fn nested -> return false;",
            "a + b * 2 -> a - b * 2",
            "b * 2 -> b / 2",
            "2 -> 3",
            "x += [0; 8].len(); -> (left out)",
            "x += [0; 8].len() -> x -= [0; 8].len()",
            "0 -> 1",
            "a.min(b) < 3 -> a.min(b) <= 3",
            "a.min(b) -> a.max(b)",
            "3 -> 4",
            "1 -> 2",
            "!(x == b) -> (x == b)",
            "x == b -> x != b",
        ];
        assert_eq!(changes, expected);
    }

    #[test]
    fn switched_sources_are_sources_and_tell_where_a_mutant_is() {
        let mutants = in_text("f.rs", TEXT).unwrap();
        let numbered = mutants.iter().enumerate().collect::<Vec<_>>();
        let switched = switched(TEXT, &numbered);
        syn::parse_file(&switched).unwrap();
        let ids = Vec::from_iter(0..mutants.len());
        for &id in &ids {
            assert_eq!(switched.matches(&format!("mutant::on({id})")).count(), 1, "{}", mutants[id]);
            let at = switched.find(&format!("on({id})")).unwrap();
            assert_eq!(around(&switched, &(at..at + 1), &ids), Some(id));
        }
        assert_eq!(around(&switched, &(0..1), &ids), None);
    }
}
