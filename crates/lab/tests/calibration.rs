//! The calibration of a machine as a file: kept, damaged, of another machine, or nowhere to be kept.

use std::{cell::RefCell, fs};

use resolvent::Calibration;
use resolvent_lab::calibration::{Place, VARIABLE, calibration};

/// The calibration at a place, and what was said.
fn at(place: &Place) -> (Option<Calibration>, String) {
    let said = RefCell::new(String::new());
    let found = calibration(place, &|line| *said.borrow_mut() += line).unwrap();
    (found, said.into_inner())
}

#[test]
fn is_measured_once_and_again_where_it_is_not_of_this_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new").join("calibration.json");
    let place = Place::Cache(path.clone());
    let (first, said) = at(&place);
    assert!(first.is_some() && said.contains("once"));
    assert_eq!(at(&place), (first, String::new()));

    let text = fs::read_to_string(&path).unwrap();
    let elsewhere = text.replace(env!("CARGO_PKG_VERSION"), "0.0.0-other");
    let half = text[..text.len() / 2].to_owned();
    let huge = " ".repeat(1 << 20) + &text;
    for damaged in [elsewhere, half, huge, String::new(), "[1]".into()] {
        fs::write(&path, damaged).unwrap();
        let (again, said) = at(&place);
        assert!(again.is_some() && said.contains("once"), "{said}");
        assert_eq!(at(&place), (again, String::new()));
    }
}

#[test]
fn never_fails_for_its_place() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(at(&Place::Off), (None, String::new()));
    let foreign = folder.path().join("letter.txt");
    fs::write(&foreign, "Dear Sir").unwrap();
    let below_a_file = foreign.join("calibration.json");
    let cases = [
        (Place::Nowhere, VARIABLE),
        (Place::Named(foreign.clone()), "left as it is"),
        (Place::Named(folder.path().into()), "is not a file"),
        (Place::Cache(below_a_file), "not kept"),
    ];
    for (place, expected) in cases {
        let (found, said) = at(&place);
        assert!(found.is_some() && said.contains(expected), "{place:?}: {said}");
    }
    assert_eq!(fs::read_to_string(foreign).unwrap(), "Dear Sir");
}
