//! Landmarks, or projected keys, for a mechanism that is named without settings.

use resolvent_kernels::{
    Mechanism,
    mechanism::{Landmarks, PoolWindows},
};

/// The most windows a side: the papers have 49 landmarks.
const MOST: usize = 7;

/// A preset with nothing but its defaults, with pooled landmarks whose number suits tokens on `grid`: one for 2 x 2 of them, two a
/// side at least where there are as many tokens, seven at most. The default windows of 4 x 4 or 8 x 8 tokens make a single landmark
/// of a small grid, which leaves little of the mechanism. As many projected keys stand for a grid's tokens. A preset with a number of
/// landmarks of its own (`nystromformer`), and any other mechanism, is as it was.
pub fn with_landmarks_for(mechanism: Mechanism, grid: [usize; 2]) -> Mechanism {
    let [rows, columns] = grid.map(|side| side.div_ceil(2).max(2).min(side).clamp(1, MOST));
    let suited = Landmarks::Pool(PoolWindows::Count(rows * columns));
    let default = Mechanism::preset(mechanism.id()).is_ok_and(|preset| preset == mechanism);
    if !default {
        return mechanism;
    }
    mechanism.with_projected(rows * columns).with_landmarks(|own| match own {
        Landmarks::Pool(PoolWindows::Count(_)) => own,
        _ => suited,
    })
}

#[cfg(test)]
mod tests {
    use resolvent_kernels::Shape;

    use super::*;

    #[test]
    fn grids_get_a_quarter_of_their_tokens() {
        for ([height, width], landmarks) in [
            ([1, 1], 1),
            ([1, 9], 5),
            ([2, 2], 4),
            ([3, 3], 4),
            ([4, 4], 4),
            ([7, 7], 16),
            ([4, 30], 14),
            ([14, 14], 49),
            ([64, 64], 49),
        ] {
            for id in ["soft", "soft-pp", "laplacian"] {
                let suited = with_landmarks_for(Mechanism::preset(id).unwrap(), [height, width]);
                let mut config = serde_json::to_value(&suited).unwrap();
                config["grid"] = vec![height, width].into();
                let (on_grid, shape) = (Mechanism::from_value(config).unwrap(), Shape::square(1, 1, height * width, 4));
                on_grid.check(&shape, false).unwrap();
                assert_eq!(on_grid.landmarks(&shape), Some(landmarks), "{id} on {height} x {width}");
            }
        }
        let linformer = with_landmarks_for(Mechanism::preset("linformer").unwrap(), [7, 7]);
        assert_eq!(linformer.projected().map(|m| m.count), Some(16));
        let own = Mechanism::from_json(r#"{"mechanism": "soft", "ridge": 0.5}"#).unwrap();
        for kept in [own, Mechanism::preset("softmax").unwrap(), Mechanism::preset("laplacian-exact").unwrap()] {
            assert_eq!(with_landmarks_for(kept.clone(), [4, 4]), kept);
        }
    }
}
