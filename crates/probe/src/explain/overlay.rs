//! Maps as pictures.

use std::io::Cursor;

use base64::{Engine, engine::general_purpose::STANDARD};
use image::{DynamicImage, GrayImage, ImageFormat, RgbImage, RgbaImage};

use super::weights::scaled;
use crate::subject::PictureExample;

/// Colours of weights from 0 to 1, dark to bright, evenly to the eye.
const COLOURS: [[f32; 3]; 5] =
    [[0.0, 0.0, 4.0], [87.0, 16.0, 110.0], [188.0, 55.0, 84.0], [249.0, 142.0, 9.0], [252.0, 255.0, 164.0]];

/// Share of the colour in an overlay; the rest is the picture in grey.
const SHARE: f32 = 0.65;

/// Least side of an overlay in pixels.
const SIDE: usize = 256;

/// Colours of weights from 0 to -1.
const NEGATIVE: [f32; 3] = [90.0, 200.0, 255.0];

/// The colour of a weight in [-1, 1].
fn colour(weight: f32) -> [f32; 3] {
    if weight < 0.0 {
        return NEGATIVE.map(|channel| channel * (-weight).min(1.0));
    }
    let at = weight.clamp(0.0, 1.0) * (COLOURS.len() - 1) as f32;
    let (from, share) = ((at as usize).min(COLOURS.len() - 2), at.fract());
    let share = if at as usize == COLOURS.len() - 1 { 1.0 } else { share };
    std::array::from_fn(|channel| COLOURS[from][channel] * (1.0 - share) + COLOURS[from + 1][channel] * share)
}

/// The picture as a PNG.
pub fn picture(picture: &PictureExample) -> Vec<u8> {
    let (width, height) = (picture.shape.width as u32, picture.shape.height as u32);
    let plane = picture.shape.plane();
    let at = |x: u32, y: u32| (y * width + x) as usize;
    png(match picture.shape.channels {
        1 => GrayImage::from_fn(width, height, |x, y| [picture.bytes[at(x, y)]].into()).into(),
        _ => {
            let pixel = |x, y| std::array::from_fn(|channel| picture.bytes[channel * plane + at(x, y)]);
            RgbImage::from_fn(width, height, |x, y| pixel(x, y).into()).into()
        }
    })
}

/// A map as a PNG of one pixel per place, to be laid over the picture.
pub fn heat(weights: &[f32], [rows, columns]: [usize; 2]) -> Vec<u8> {
    let weights = scaled(weights);
    let pixel = |x: u32, y: u32| {
        let [red, green, blue] = colour(weights[y as usize * columns + x as usize]).map(|value| value.round() as u8);
        [red, green, blue, (255.0 * SHARE).round() as u8].into()
    };
    png(RgbaImage::from_fn(columns as u32, rows as u32, pixel).into())
}

/// Rows of weights as a PNG of one pixel per pair, each row by its own largest weight; what a row lacks is transparent.
pub fn pairs(rows: &[Vec<f32>]) -> Vec<u8> {
    let rows: Vec<Vec<f32>> = rows
        .iter()
        .map(|row| {
            let largest = row.iter().fold(0.0, |largest: f32, weight| largest.max(weight.abs()));
            row.iter().map(|weight| if largest > 0.0 { weight / largest } else { 0.0 }).collect()
        })
        .collect();
    let side = rows.len() as u32;
    let pixel = |x: u32, y: u32| match rows[y as usize].get(x as usize) {
        Some(&weight) => {
            let [red, green, blue] = colour(weight).map(|value| value.round() as u8);
            [red, green, blue, 255].into()
        }
        None => [0; 4].into(),
    };
    png(RgbaImage::from_fn(side, side, pixel).into())
}

/// The map laid over the picture, as a PNG: the picture in grey, each place in its colour, boxes outlined in white.
pub fn overlay(picture: &PictureExample, weights: &[f32], [rows, columns]: [usize; 2]) -> Vec<u8> {
    let (weights, shape, plane) = (scaled(weights), picture.shape, picture.shape.plane());
    let zoom = SIDE.div_ceil(shape.height.min(shape.width)).max(1);
    let mut image = RgbImage::from_fn((shape.width * zoom) as u32, (shape.height * zoom) as u32, |x, y| {
        let (column, row) = (x as usize / zoom, y as usize / zoom);
        let at = row * shape.width + column;
        let grey = (0..shape.channels).map(|channel| f32::from(picture.bytes[channel * plane + at])).sum::<f32>();
        let grey = grey / shape.channels as f32;
        let weight = weights[row * rows / shape.height * columns + column * columns / shape.width];
        colour(weight).map(|value| (SHARE * value + (1.0 - SHARE) * grey).round() as u8).into()
    });
    for region in picture.boxes.iter().flatten() {
        let edge = |at: f64, most: u32| ((at * zoom as f64) as u32).min(most - 1);
        let (width, height) = image.dimensions();
        let (left, right) = (edge(region.left, width), edge(region.right, width));
        let (top, bottom) = (edge(region.top, height), edge(region.bottom, height));
        for x in left..=right {
            [top, bottom].into_iter().for_each(|y| image.put_pixel(x, y, [255; 3].into()));
        }
        for y in top..=bottom {
            [left, right].into_iter().for_each(|x| image.put_pixel(x, y, [255; 3].into()));
        }
    }
    png(image.into())
}

fn png(image: DynamicImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, ImageFormat::Png).expect("memory takes every byte, and PNG these pixels");
    bytes.into_inner()
}

/// The colours from 0 to the strongest as a gradient of CSS, with those below zero where they are `signed`.
pub fn gradient(signed: bool) -> String {
    let stop = |weight: f32| {
        let [red, green, blue] = colour(weight).map(|value| value.round() as u8);
        format!("rgb({red} {green} {blue})")
    };
    let from: &[f32] = if signed { &[-1.0] } else { &[] };
    let stops: Vec<String> = from.iter().copied().chain((0..=4).map(|n| n as f32 / 4.0)).map(stop).collect();
    format!("linear-gradient(90deg, {})", stops.join(", "))
}

/// A PNG as an address that holds it.
pub fn address(png: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(png))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subject::Region;
    use resolvent_lab::data::PictureShape;

    #[test]
    fn an_overlay_is_brightest_where_the_weight_is() {
        let shape = PictureShape { channels: 3, height: 4, width: 4 };
        let boxes = Some(vec![Region { left: 0.0, top: 0.0, right: 1.0, bottom: 1.0 }]);
        let example = PictureExample { name: String::new(), shape, bytes: vec![128; 48], label: None, boxes };
        let read = |png: &[u8]| image::load_from_memory(png).unwrap().to_rgb8();
        let image = read(&overlay(&example, &[0.0, 0.1, 0.2, 0.9], [2, 2]));
        assert_eq!(image.dimensions(), (256, 256));
        let bright = |x, y| image.get_pixel(x, y).0.iter().map(|&value| u32::from(value)).sum::<u32>();
        assert!(bright(200, 200) > bright(200, 50) && bright(200, 50) < bright(50, 200));
        assert_eq!(image.get_pixel(0, 30).0, [255; 3], "the box");
        assert_eq!(read(&picture(&example)).get_pixel(1, 1).0, [128; 3]);
        assert_eq!(read(&heat(&[0.0, 0.1, 0.2, 1.0], [2, 2])).get_pixel(1, 1).0, [252, 255, 164]);
        assert!(address(&[1, 2, 3]).ends_with("base64,AQID"));
    }

    #[test]
    fn colours_rise_in_brightness() {
        let sum = |weight: f32| colour(weight).iter().sum::<f32>();
        assert!((0..20).all(|i| sum(i as f32 / 20.0) < sum((i + 1) as f32 / 20.0)));
        assert_eq!((colour(0.0), colour(1.0)), (COLOURS[0], COLOURS[4]));
    }
}
