//! What is known of pictures beside their pixels.

/// The shape of one picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PictureShape {
    /// 1 (grey) or 3 (red, green, blue).
    pub channels: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl PictureShape {
    /// Values in one plane.
    pub fn plane(&self) -> usize {
        self.height * self.width
    }

    /// Values in one picture.
    pub fn volume(&self) -> usize {
        self.channels * self.plane()
    }
}

/// Mean and standard deviation of each channel, of values scaled to [0, 1].
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelStats {
    /// Mean per channel.
    pub mean: Vec<f32>,
    /// Standard deviation per channel, at least 1/255 so that a constant channel can be divided by it.
    pub std: Vec<f32>,
}
