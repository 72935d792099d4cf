//! Where objects lie, in Pascal VOC's XML.

use std::path::Path;

use resolvent_lab::{
    data::{Error, Result},
    source::Document,
};
use roxmltree::Node;

/// The part of a picture that an object takes up, in pixels from its upper left corner.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Region {
    /// Left edge.
    pub left: f64,
    /// Upper edge.
    pub top: f64,
    /// Right edge.
    pub right: f64,
    /// Lower edge.
    pub bottom: f64,
}

impl Region {
    /// Whether the point is inside.
    pub fn contains(&self, x: f64, y: f64) -> bool {
        (self.left..self.right).contains(&x) && (self.top..self.bottom).contains(&y)
    }
}

/// Reads the boxes of a picture of `width x height` pixels from the annotation in `path`.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for what is no annotation, is one of a picture of another size, or has a box that is empty
/// or leaves the picture.
pub fn read(path: &Path, width: usize, height: usize) -> Result<Vec<Region>> {
    let text = Document::read(path)?;
    regions(&text, width as f64, height as f64).map_err(|problem| Error::Format { path: path.into(), problem })
}

fn regions(text: &str, width: f64, height: f64) -> std::result::Result<Vec<Region>, String> {
    let document = roxmltree::Document::parse(text).map_err(|e| format!("is no XML ({e}); write it again"))?;
    let root = document.root_element();
    if !root.has_tag_name("annotation") {
        return Err(format!("has a root `{}`, expected `annotation` of Pascal VOC", root.tag_name().name()));
    }
    if let Some(size) = child(root, "size") {
        let (stated, found) = ([number(size, "width")?, number(size, "height")?], [width, height]);
        if stated != found {
            return Err(format!("is of a picture of {stated:?} pixels (width, height), which has {found:?}"));
        }
    }
    let objects = root.children().filter(|node| node.has_tag_name("object"));
    objects.enumerate().map(|(index, object)| region(index + 1, object, width, height)).collect()
}

fn region(number_of: usize, object: Node<'_, '_>, width: f64, height: f64) -> std::result::Result<Region, String> {
    let bounds = child(object, "bndbox").ok_or_else(|| format!("object {number_of} has no `bndbox`"))?;
    let at = |name| number(bounds, name).map_err(|problem| format!("object {number_of} {problem}"));
    let region = Region { left: at("xmin")?, top: at("ymin")?, right: at("xmax")?, bottom: at("ymax")? };
    let Region { left, top, right, bottom } = region;
    if left < 0.0 || top < 0.0 || right > width || bottom > height {
        return Err(format!(
            "object {number_of} ({left} to {right} across, {top} to {bottom} down) leaves the picture of {width} x {height} pixels"
        ));
    }
    if left >= right || top >= bottom {
        return Err(format!("object {number_of} ({left} to {right} across, {top} to {bottom} down) is empty"));
    }
    Ok(region)
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn number(node: Node<'_, '_>, name: &str) -> std::result::Result<f64, String> {
    let text = child(node, name).and_then(|child| child.text()).unwrap_or_default().trim();
    let finite = text.parse().ok().filter(|x: &f64| x.is_finite());
    finite.ok_or_else(|| format!("has `{name}` = `{text}`, expected a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotation(size: &str, bounds: [&str; 4]) -> String {
        let [left, top, right, bottom] = bounds;
        format!(
            "<annotation><filename>a.jpg</filename>{size}<object><name>dog</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>\
             <xmax>{right}</xmax><ymax> {bottom} </ymax></bndbox></object><object><name>cat</name><part/>\
             <bndbox><ymax>4</ymax><xmax>3</xmax><ymin>2</ymin><xmin>1</xmin></bndbox></object></annotation>"
        )
    }

    const SIZE: &str = "<size><width>40</width><height>30</height><depth>3</depth></size>";

    #[test]
    fn boxes_are_read_in_any_order_and_with_fractions() {
        let found = regions(&annotation(SIZE, ["5", "6.5", "40", "30"]), 40.0, 30.0).unwrap();
        assert_eq!(found[0], Region { left: 5.0, top: 6.5, right: 40.0, bottom: 30.0 });
        assert_eq!(found[1], Region { left: 1.0, top: 2.0, right: 3.0, bottom: 4.0 });
        assert!(found[1].contains(1.0, 3.9) && !found[1].contains(3.0, 3.0));
        assert_eq!(regions("<annotation/>", 4.0, 4.0).unwrap(), []);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refused = |text: &str| regions(text, 40.0, 30.0).unwrap_err();
        assert!(refused(&annotation(SIZE, ["5", "6", "41", "30"])).contains("object 1 (5 to 41 across"));
        assert!(refused(&annotation(SIZE, ["-1", "6", "40", "30"])).contains("leaves the picture"));
        assert!(refused(&annotation(SIZE, ["9", "6", "9", "30"])).contains("is empty"));
        assert!(refused(&annotation(SIZE, ["five", "6", "9", "30"])).contains("`xmin` = `five`"));
        assert!(refused(&annotation(SIZE, ["NaN", "6", "9", "30"])).contains("expected a number"));
        assert!(
            refused(&annotation(&SIZE.replace("40", "80"), ["5", "6", "9", "30"]))
                .contains("of a picture of [80.0, 30.0]")
        );
        assert!(refused("<annotation><object/></annotation>").contains("object 1 has no `bndbox`"));
        assert!(refused("<html/>").contains("root `html`"));
        assert!(refused("not xml").contains("no XML"));
    }
}
