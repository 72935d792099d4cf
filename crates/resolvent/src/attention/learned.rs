//! The parameters of a mechanism that are learned per head: which they are, and what stands for them.

use std::fmt;

use burn::{
    module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param},
    tensor::{Device, Tensor, activation::sigmoid},
};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{IgnoredAny, MapAccess, Visitor},
    ser::SerializeMap,
};

use super::field;
use crate::{Error, Parameter};

/// How a parameter that has bounds follows from a value that has none, which is what an optimiser moves.
#[derive(Debug, Clone, Copy)]
enum Map {
    /// `low + sigmoid(free)`, inside `(low, low + 1)`.
    Logit { low: u8 },
    /// `exp(free)`, above 0: a step changes it by a part of itself, whatever its size.
    Log,
    /// `free`.
    Identity,
}

impl Map {
    /// The map of `parameter`: the one place to say that a parameter has bounds.
    fn of(parameter: Parameter) -> Self {
        match parameter {
            Parameter::Gamma => Self::Logit { low: 0 },
            // The Levy kernel is one family inside (1, 2).
            Parameter::Alpha => Self::Logit { low: 1 },
            Parameter::Kappa | Parameter::Lambda | Parameter::Scale => Self::Log,
            _ => Self::Identity,
        }
    }

    /// The parameter of a free value.
    fn bounded(self, free: Tensor<1>) -> Tensor<1> {
        match self {
            Self::Logit { low: 0 } => sigmoid(free),
            Self::Logit { low } => sigmoid(free) + f64::from(low),
            Self::Log => free.exp(),
            Self::Identity => free,
        }
    }

    /// The free value of a parameter.
    fn free(self, bounded: f64) -> f64 {
        match self {
            Self::Logit { low } => ((bounded - f64::from(low)) / (f64::from(low) + 1.0 - bounded)).ln(),
            Self::Log => bounded.ln(),
            Self::Identity => bounded,
        }
    }

    /// What the free value is called after the parameter, in checkpoints too.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Logit { .. } => "_logit",
            Self::Log => "_log",
            Self::Identity => "",
        }
    }

    /// Checks that some free value stands for `start`.
    fn check(self, parameter: Parameter, start: f64) -> Result<(), Error> {
        let (ok, expected) = match self {
            Self::Logit { low: 0 } => (start > 0.0 && start < 1.0, "inside (0, 1) where it is trained"),
            Self::Logit { .. } => (start > 1.0 && start < 2.0, "inside (1, 2) where it is trained"),
            Self::Log => (start > 0.0, "above 0 where it is trained"),
            Self::Identity => (start.is_finite(), "finite"),
        };
        field(parameter.name(), start, ok, expected)
    }
}

/// Which parameters are learned per head, where the mechanism has them. Default: the decay alone ("Infinite Self-Attention",
/// section 3.2). What [`Parameter::is_weights`] names is learned in any case.
///
/// In files every parameter is a field of its own, `gamma_trainable` and so on.
///
/// ```
/// use resolvent::{Parameter, attention::Trained};
/// let trained = Trained::from([Parameter::Alpha, Parameter::Kappa]);
/// assert!(trained.contains(Parameter::Alpha) && !trained.contains(Parameter::Gamma));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trained(Vec<Parameter>);

impl Default for Trained {
    fn default() -> Self {
        Self(vec![Parameter::Gamma])
    }
}

impl<const N: usize> From<[Parameter; N]> for Trained {
    fn from(parameters: [Parameter; N]) -> Self {
        parameters.into_iter().fold(Self(Vec::new()), |trained, parameter| trained.with(parameter, true))
    }
}

impl Trained {
    /// The same with `parameter` learned or not.
    #[must_use]
    pub fn with(mut self, parameter: Parameter, learned: bool) -> Self {
        self.0.retain(|&other| other != parameter);
        self.0.extend((learned && !parameter.is_weights()).then_some(parameter));
        self.0.sort();
        self
    }

    /// Whether `parameter` is learned.
    pub fn contains(&self, parameter: Parameter) -> bool {
        self.0.contains(&parameter)
    }

    /// The parameters that may be learned or not, and what says so in a file.
    fn fields() -> impl Iterator<Item = (Parameter, String)> {
        let free = Parameter::ALL.into_iter().filter(|parameter| !parameter.is_weights());
        free.map(|parameter| (parameter, format!("{}_trainable", parameter.name())))
    }
}

impl Serialize for Trained {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (parameter, name) in Self::fields() {
            map.serialize_entry(&name, &self.contains(parameter))?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Trained {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Trained;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("fields such as `gamma_trainable`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Trained, A::Error> {
                let mut trained = Trained::default();
                while let Some(key) = map.next_key::<String>()? {
                    match Trained::fields().find(|(_, name)| *name == key) {
                        Some((parameter, _)) => trained = trained.with(parameter, map.next_value()?),
                        None => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(trained)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// The parameters that a layer learns per head, by name.
///
/// It adds nothing to the path of a tensor: the free value of the decay is `attention.gamma_logit` in a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct Learned(Vec<Entry>);

#[derive(Debug, Clone)]
struct Entry {
    parameter: Parameter,
    /// `[heads]`.
    free: Param<Tensor<1>>,
    /// The parameter is the bounded value to this power.
    power: usize,
}

/// What the free value of `parameter` is called.
fn free_name(parameter: Parameter) -> String {
    format!("{}{}", parameter.name(), Map::of(parameter).suffix())
}

impl Learned {
    /// Checks where parameters start per head.
    pub(super) fn check(starts: &[(Parameter, Vec<f64>)]) -> Result<(), Error> {
        let mut values = starts.iter().flat_map(|(parameter, start)| start.iter().map(|&start| (*parameter, start)));
        values.try_for_each(|(parameter, start)| Map::of(parameter).check(parameter, start))
    }

    /// Parameters that start as told, per head; the decay is used to the power `gamma_power`.
    pub(super) fn init(mut starts: Vec<(Parameter, Vec<f64>)>, gamma_power: usize, device: &Device) -> Self {
        starts.sort_by_key(|(parameter, _)| *parameter);
        let entry = |(parameter, start): (Parameter, Vec<f64>)| {
            let free: Vec<f32> = start.into_iter().map(|start| Map::of(parameter).free(start) as f32).collect();
            let power = if parameter == Parameter::Gamma { gamma_power } else { 1 };
            Entry { parameter, free: Param::from_tensor(Tensor::from_floats(free.as_slice(), device)), power }
        };
        Self(starts.into_iter().map(entry).collect())
    }

    /// The value of `parameter` per head, `[heads]`; `None` where it is fixed or the mechanism has none.
    pub fn value(&self, parameter: Parameter) -> Option<Tensor<1>> {
        let entry = self.0.iter().find(|entry| entry.parameter == parameter)?;
        let value = Map::of(parameter).bounded(entry.free.val());
        Some(if entry.power == 1 { value } else { value.powi_scalar(entry.power as i64) })
    }

    /// What an optimiser moves in place of `parameter`, `[heads]`.
    pub fn free(&self, parameter: Parameter) -> Option<&Param<Tensor<1>>> {
        self.0.iter().find(|entry| entry.parameter == parameter).map(|entry| &entry.free)
    }

    /// The parameters and their values.
    pub fn values(&self) -> impl Iterator<Item = (Parameter, Tensor<1>)> {
        self.0.iter().filter_map(|entry| Some((entry.parameter, self.value(entry.parameter)?)))
    }

    /// The same with the free value of `parameter` changed.
    #[must_use]
    pub fn map_free(self, parameter: Parameter, mut change: impl FnMut(Tensor<1>) -> Tensor<1>) -> Self {
        self.each(|of, free| if of == parameter { free.map(&mut change) } else { free })
    }

    /// The same with `parameter` no longer learned.
    pub(super) fn without(mut self, parameter: Parameter) -> Self {
        self.0.retain(|entry| entry.parameter != parameter);
        self
    }

    /// The same with every free value changed.
    fn each(self, mut change: impl FnMut(Parameter, Param<Tensor<1>>) -> Param<Tensor<1>>) -> Self {
        let entry = |entry: Entry| Entry { free: change(entry.parameter, entry.free), ..entry };
        Self(self.0.into_iter().map(entry).collect())
    }
}

/// The field of [`super::MultiHeadAttention`] that holds the collection, and the container that it is a field of.
const FIELD: [&str; 2] = ["learned", "Struct:MultiHeadAttention"];

/// Like a derived implementation, but that a tensor has its own name in the place of the field's.
impl Module for Learned {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.iter().fold(devices, |devices, entry| entry.free.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        self.each(|_, free| free.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.each(|_, free| Module::to_device(free, device))
    }

    fn train(self) -> Self {
        self.each(|_, free| Module::train(free))
    }

    fn valid(&self) -> Self {
        self.clone().each(|_, free| Module::valid(&free))
    }

    fn materialize(self) -> Self {
        self.each(|_, free| Module::materialize(free))
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let [field, container] = FIELD;
        for entry in &self.0 {
            let name = free_name(entry.parameter);
            visitor.exit_module(field, container);
            visitor.enter_module(&name, container);
            entry.free.visit(visitor);
            visitor.exit_module(&name, container);
            visitor.enter_module(field, container);
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let [field, container] = FIELD;
        self.each(|parameter, free| {
            let name = free_name(parameter);
            mapper.exit_module(field, container);
            mapper.enter_module(&name, container);
            let free = Module::map(free, mapper);
            mapper.exit_module(&name, container);
            mapper.enter_module(field, container);
            free
        })
    }
}

impl ModuleDisplayDefault for Learned {
    fn content(&self, content: Content) -> Option<Content> {
        self.0.iter().fold(content, |content, entry| content.add(&free_name(entry.parameter), &entry.free)).optional()
    }
}

impl ModuleDisplay for Learned {}
