//! Draws the first training pictures of any data set on one sheet, a column per class, objects boxed where known.
//!
//! `cargo run --release --example contact_sheet -- shapes:difficulty=0.3 sheet.png`

use std::{env, error::Error, process::ExitCode};

use image::{Rgb, RgbImage};
use resolvent_lab::data::{ObjectBox, PictureSpec, PictureSplit};

/// Rows of the sheet; how much larger than life the pictures are.
const ROWS: u32 = 6;
const ZOOM: u32 = 3;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [data, output] = &arguments[..] else {
        eprintln!("usage: contact_sheet KIND:PATH OUTPUT.png");
        return ExitCode::from(2);
    };
    match draw(data, output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn draw(data: &str, output: &str) -> Result<(), Box<dyn Error>> {
    let data = PictureSpec::parse(data)?.load()?;
    let (width, height) = (data.shape.width as u32 * ZOOM + 2, data.shape.height as u32 * ZOOM + 2);
    let mut sheet = RgbImage::from_pixel(data.classes.len() as u32 * width, ROWS * height, Rgb([255; 3]));
    let mut used = vec![0; data.classes.len()];
    for (index, &class) in data.train.labels().iter().enumerate() {
        let row = &mut used[class as usize];
        if *row < ROWS {
            paste(&mut sheet, (class * width, *row * height), &data.train, index)?;
            *row += 1;
        }
    }
    sheet.save(output)?;
    println!("{} classes: {}", data.classes.len(), data.classes.join(", "));
    Ok(())
}

fn paste(
    sheet: &mut RgbImage,
    (left, top): (u32, u32),
    split: &PictureSplit,
    index: usize,
) -> resolvent_lab::data::Result<()> {
    let (shape, picture) = (split.shape(), split.picture(index)?);
    let object = split.boxes().map(|boxes| boxes[index]);
    for (y, x) in (0..shape.height as u32 * ZOOM).flat_map(|y| (0..shape.width as u32 * ZOOM).map(move |x| (y, x))) {
        let at = (y / ZOOM) as usize * shape.width + (x / ZOOM) as usize;
        let value = |channel: usize| picture[(channel % shape.channels) * shape.plane() + at];
        let colour =
            if object.is_some_and(|object| on_frame(object, x, y)) { [255, 0, 0] } else { [0, 1, 2].map(value) };
        sheet.put_pixel(left + x, top + y, Rgb(colour));
    }
    Ok(())
}

fn on_frame(object: ObjectBox, x: u32, y: u32) -> bool {
    let ObjectBox { left, top, right, bottom } = object;
    let (columns, rows) = (left * ZOOM..right * ZOOM, top * ZOOM..bottom * ZOOM);
    let edge = |at: u32, span: &std::ops::Range<u32>| at == span.start || at + 1 == span.end;
    columns.contains(&x) && rows.contains(&y) && (edge(x, &columns) || edge(y, &rows))
}
