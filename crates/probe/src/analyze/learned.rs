//! What the layers of a trained model have learned for their mechanism, head by head.

use std::collections::BTreeMap;

use resolvent_kernels::{Extras, Mechanism, Parameter};

use crate::subject::LayerCall;

/// Parameters with one number a head.
const NUMBERS: [Parameter; 6] =
    [Parameter::Gamma, Parameter::Alpha, Parameter::Kappa, Parameter::Lambda, Parameter::Scale, Parameter::Offset];

/// Whether a head has a part of a parameter's own, or shares it as it is. Filters and landmarks are not among them.
fn is_of_heads(parameter: Parameter) -> bool {
    NUMBERS.contains(&parameter) || parameter == Parameter::Bias || parameter.is_map()
}

/// What a model has learned for its own mechanism: decays, orders and length scales, one a head, biases and maps of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Learned {
    /// The mechanism that they belong to.
    mechanism: Mechanism,
    /// By the layers' names.
    layers: BTreeMap<String, Vec<(Parameter, Vec<f32>)>>,
}

impl Learned {
    /// What `calls`, those of one example, were made with where they are of `mechanism`, on whatever grid.
    pub(super) fn new(mechanism: Mechanism, calls: &[LayerCall]) -> Self {
        let own = |call: &LayerCall| {
            let per_head = call.parameters.iter().filter(|(parameter, _)| is_of_heads(*parameter));
            (call.place.name.clone(), per_head.cloned().collect::<Vec<_>>())
        };
        let layers = calls.iter().filter(|call| call.mechanism.id() == mechanism.id()).map(own).collect();
        Self { mechanism, layers }
    }

    /// Those of `layer`, if `mechanism` is the one they were learned for.
    pub(super) fn of(&self, layer: &str, mechanism: &Mechanism) -> &[(Parameter, Vec<f32>)] {
        match self.layers.get(layer) {
            Some(parameters) if *mechanism == self.mechanism => parameters,
            _ => &[],
        }
    }
}

/// `parameters` as a call has them.
pub(super) fn extras(parameters: &[(Parameter, Vec<f32>)]) -> Extras<'_> {
    parameters.iter().fold(Extras::default(), |extras, (parameter, values)| extras.with(*parameter, values))
}

/// `mechanism` for `head` alone, with what it has learned in the place of its fields.
pub(super) fn settled(mechanism: &Mechanism, parameters: &[(Parameter, Vec<f32>)], head: usize) -> Mechanism {
    let mut config = serde_json::to_value(mechanism).expect("a mechanism is plain data");
    for (parameter, values) in parameters.iter().filter(|(parameter, _)| NUMBERS.contains(parameter)) {
        // A composition has its numbers in its parts.
        for part in ["", "/score", "/series"] {
            if let Some(field) = config.pointer_mut(&format!("{part}/{}", parameter.name())) {
                *field = f64::from(values[head]).into();
            }
        }
    }
    Mechanism::from_value(config).unwrap_or_else(|_| mechanism.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_a_head_takes_the_place_of_its_field() {
        let read = |json: &str| Mechanism::from_json(json).unwrap();
        for (json, parameter, expected) in [
            (r#"{"mechanism": "infsa"}"#, Parameter::Gamma, r#"{"mechanism": "infsa", "gamma": 0.25}"#),
            (r#"{"mechanism": "fna"}"#, Parameter::Kappa, r#"{"mechanism": "fna", "kappa": 0.25}"#),
            (r#"{"mechanism": "laplacian"}"#, Parameter::Lambda, r#"{"mechanism": "laplacian", "lambda": 0.25}"#),
            (r#"{"mechanism": "soft"}"#, Parameter::Scale, r#"{"mechanism": "soft", "scale": 0.25}"#),
        ] {
            let learned = [(parameter, vec![0.5, 0.25])];
            assert_eq!(settled(&read(json), &learned, 1), read(expected));
            assert_eq!(settled(&read(json), &[], 1), read(json));
        }
    }
}
