//! The generated pictures: reproducible, balanced, with boxes that hold the object.

use resolvent_lab::data::{ObjectBox, Shapes};

fn small() -> Shapes {
    Shapes { train: 160, test: 40, ..Shapes::default() }
}

#[test]
fn the_same_settings_give_the_same_pictures_on_any_number_of_threads() {
    let data = small().generate().unwrap();
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert_eq!(single.install(|| small().generate().unwrap()), data);
    let other = Shapes { seed: 1, ..small() }.generate().unwrap();
    assert_ne!(other.fingerprint(), data.fingerprint());
    let longer = Shapes { train: 200, ..small() }.generate().unwrap();
    assert_eq!(
        longer.train.picture(159).unwrap(),
        data.train.picture(159).unwrap(),
        "a longer set starts with the shorter one"
    );
    assert_ne!(data.train.picture(0).unwrap(), data.test.picture(0).unwrap(), "the splits share no picture");
}

#[test]
fn classes_are_balanced_and_every_picture_has_its_box_and_difficulty() {
    for difficulty in [0.0, 0.5, 1.0] {
        for size in [16, 32, 65] {
            let data = Shapes { difficulty, size, ..small() }.generate().unwrap();
            for class in 0..data.classes.len() as u32 {
                assert_eq!(data.train.labels().iter().filter(|&&label| label == class).count(), 20);
            }
            for (index, &ObjectBox { left, top, right, bottom }) in data.train.boxes().unwrap().iter().enumerate() {
                assert!(left < right && right as usize <= size, "picture {index}: columns {left}..{right} of {size}");
                assert!(top < bottom && bottom as usize <= size, "picture {index}: rows {top}..{bottom} of {size}");
                let share = ((right - left) * (bottom - top)) as f64 / (size * size) as f64;
                assert!((0.01..0.35).contains(&share), "picture {index}: the box covers {share}");
            }
            assert!(data.train.difficulty().unwrap().iter().all(|own| (0.0..=1.0).contains(own)));
        }
    }
}

#[test]
fn harder_settings_make_smaller_objects() {
    let area = |difficulty| -> u32 {
        let data = Shapes { difficulty, ..small() }.generate().unwrap();
        let boxes = data.train.boxes().unwrap();
        boxes.iter().map(|object| (object.right - object.left) * (object.bottom - object.top)).sum()
    };
    assert!(area(0.0) > 2 * area(1.0));
}

/// Without clutter, noise and texture (difficulty 0) the object stands out: the middle of its box differs from the
/// picture's border far more often than not.
#[test]
fn the_object_is_where_its_box_says() {
    let data = Shapes { difficulty: 0.0, ..small() }.generate().unwrap();
    let boxes = data.train.boxes().unwrap();
    let inside_differs = |index: usize| {
        let (picture, plane) = (data.train.picture(index).unwrap(), data.shape.plane());
        let ObjectBox { left, top, right, bottom } = boxes[index];
        let level = |row: u32, column: u32| -> f64 {
            let at = row as usize * data.shape.width + column as usize;
            (0..3).map(|channel| f64::from(picture[channel * plane + at])).sum()
        };
        let border: f64 = (0..32).map(|at| level(0, at) + level(31, at)).sum::<f64>() / 64.0;
        let area = f64::from((right - left) * (bottom - top));
        let rows = (top..bottom).flat_map(|row| (left..right).map(move |column| (row, column)));
        rows.map(|(row, column)| (level(row, column) - border).abs()).sum::<f64>() / area > 60.0
    };
    let found = (0..data.train.len()).filter(|&index| inside_differs(index)).count();
    assert!(found > data.train.len() * 9 / 10, "{found} of {}", data.train.len());
}
