//! How well a map finds the boxes that objects lie in.

use serde::Serialize;

use crate::subject::{PictureExample, Region};

/// A map beside the boxes of one picture.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Localisation {
    /// The chance that a place inside weighs more than one outside (ties count half): 1 is perfect, 0.5 chance.
    pub roc_auc: f64,
    /// Precision, averaged over the places inside as they are found: 1 is perfect, the boxes' share of the picture chance.
    pub average_precision: f64,
    /// Share of the weight that is inside.
    pub mass: f64,
    /// Share of the places that are inside.
    pub prevalence: f64,
}

/// Which places of `grid`, row by row, have their middle in a box.
pub fn inside(picture: &PictureExample, boxes: &[Region], [rows, columns]: [usize; 2]) -> Vec<bool> {
    let (height, width) = (picture.shape.height as f64, picture.shape.width as f64);
    let middle = |at: usize, places: usize, extent: f64| (at as f64 + 0.5) * extent / places as f64;
    let place = |at: usize| {
        let (x, y) = (middle(at % columns, columns, width), middle(at / columns, rows, height));
        boxes.iter().any(|region| region.contains(x, y))
    };
    (0..rows * columns).map(place).collect()
}

impl Localisation {
    /// Of `weights` on places of which some are `inside`; `None` where all are, or none.
    pub fn new(weights: &[f32], inside: &[bool]) -> Option<Self> {
        let (all, positive) = (inside.len() as f64, inside.iter().filter(|&&inside| inside).count() as f64);
        if positive == 0.0 || positive == all {
            return None;
        }
        let mut ordered: Vec<(f32, bool)> = weights.iter().copied().zip(inside.iter().copied()).collect();
        ordered.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (mut found, mut seen, mut pairs, mut precision) = (0.0, 0.0, 0.0, 0.0);
        for ties in ordered.chunk_by(|a, b| a.0 == b.0) {
            let here = ties.iter().filter(|(_, inside)| *inside).count() as f64;
            let outside = ties.len() as f64 - here;
            // Those outside here weigh less than what was found before, and as much as what is found here.
            pairs += outside * (found + 0.5 * here);
            found += here;
            seen += ties.len() as f64;
            precision += here / positive * found / seen;
        }
        let sum: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
        let within: f64 = ordered.iter().filter(|(_, inside)| *inside).map(|(weight, _)| f64::from(*weight)).sum();
        Some(Self {
            roc_auc: pairs / (positive * (all - positive)),
            average_precision: precision,
            mass: if sum > 0.0 { within / sum } else { 0.0 },
            prevalence: positive / all,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use resolvent_lab::data::PictureShape;

    const INSIDE: [bool; 8] = [false, true, false, true, false, false, false, false];

    #[test]
    fn a_perfect_map_a_wrong_one_and_a_flat_one() {
        let perfect: Vec<f32> = INSIDE.iter().map(|&inside| f32::from(u8::from(inside))).collect();
        let found = Localisation::new(&perfect, &INSIDE).unwrap();
        assert_eq!((found.roc_auc, found.average_precision, found.mass, found.prevalence), (1.0, 1.0, 1.0, 0.25));
        let wrong: Vec<f32> = perfect.iter().map(|weight| 1.0 - weight).collect();
        let found = Localisation::new(&wrong, &INSIDE).unwrap();
        assert_eq!((found.roc_auc, found.average_precision, found.mass), (0.0, 0.25, 0.0));
        let flat = Localisation::new(&[0.5; 8], &INSIDE).unwrap();
        assert_eq!((flat.roc_auc, flat.average_precision, flat.mass), (0.5, 0.25, 0.25));
        assert_eq!(Localisation::new(&[0.5; 2], &[true, true]), None);
        assert_eq!(Localisation::new(&[0.5; 2], &[false, false]), None);
    }

    #[test]
    fn a_known_order() {
        // Found at ranks 1 and 3 of 4.
        let found = Localisation::new(&[0.9, 0.7, 0.5, 0.1], &[true, false, true, false]).unwrap();
        assert!((found.roc_auc - 0.75).abs() < 1e-12);
        assert!((found.average_precision - (0.5 + 0.5 * 2.0 / 3.0)).abs() < 1e-12);
        assert!((found.mass - 1.4 / 2.2).abs() < 1e-6);
    }

    #[test]
    fn random_maps_are_at_chance_on_average() {
        let inside: Vec<bool> = (0..100).map(|place| place % 10 < 3).collect();
        let map =
            |seed: u64| (0..100).map(|i| (((i + 1) * (seed + 17) * 7919) as f32 * 0.37).sin()).collect::<Vec<_>>();
        let mean = (0..300).map(|seed| Localisation::new(&map(seed), &inside).unwrap().roc_auc).sum::<f64>() / 300.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn places_count_by_their_middle() {
        let shape = PictureShape { channels: 1, height: 4, width: 8 };
        let picture = PictureExample { name: String::new(), shape, bytes: vec![0; 32], label: None, boxes: None };
        let region = Region { left: 0.0, top: 0.0, right: 3.0, bottom: 4.0 };
        // Middles across at 1, 3, 5, 7: the right edge of a box is outside.
        assert_eq!(inside(&picture, &[region], [1, 4]), [true, false, false, false]);
        assert_eq!(
            inside(&picture, &[region, Region { left: 4.0, right: 8.0, ..region }], [1, 4]),
            [true, false, true, true]
        );
    }
}
