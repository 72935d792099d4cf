//! Storage types: f32, and the two halves with f32 arithmetic.

/// A type that tensors may be stored in.
pub trait Element: bytemuck::Pod + Default + PartialEq + std::fmt::Debug + Send + Sync {
    /// Name of the type, for messages and benchmarks.
    const NAME: &'static str;
    /// `self`, exactly.
    fn widen(self) -> f32;
    /// The nearest value of the storage type.
    fn narrow(x: f32) -> Self;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    fn widen(self) -> f32 {
        self
    }
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Element for half::f16 {
    const NAME: &'static str = "f16";
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(x: f32) -> Self {
        half::f16::from_f32(x)
    }
}

impl Element for half::bf16 {
    const NAME: &'static str = "bf16";
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(x: f32) -> Self {
        half::bf16::from_f32(x)
    }
}
