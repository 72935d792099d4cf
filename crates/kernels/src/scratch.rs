//! Working memory that is sized by the plan, passed in and reused.

/// One cache line of f32: buffers cut at multiples of it never share a line between threads.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Reusable working memory. It grows when a call needs more than it holds and never shrinks: after the first call
/// nothing is allocated. (The first touch of a fresh page can cost more than the arithmetic done on it.)
#[derive(Debug, Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// Memory for `len` f32.
    pub fn new(len: usize) -> Self {
        Self { lines: vec![Line::default(); len.div_ceil(16)] }
    }

    /// Number of f32 held.
    pub fn len(&self) -> usize {
        self.lines.len() * 16
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// `len` f32 of unspecified content, aligned to a cache line.
    pub fn take(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::default());
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }
}
