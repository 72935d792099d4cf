//! Mechanisms of one paper, which share their settings.

use resolvent_kernels::Mechanism;

/// Whether two mechanisms are of one family: the same, or `soft` and `soft-pp`, or `laplacian` and `laplacian-exact`.
pub(super) fn related(a: &Mechanism, b: &Mechanism) -> bool {
    let family = |m: &Mechanism| match m.id() {
        "soft-pp" => "soft",
        "laplacian-exact" => "laplacian",
        id => id,
    };
    family(a) == family(b)
}

/// `own` where it has the id of `mechanism`, and `mechanism` with the settings of `own` where it is a relative: a comparison of
/// the two should compare nothing else.
pub fn with_settings_of(own: Option<&Mechanism>, mechanism: Mechanism) -> Mechanism {
    let Some(own) = own.filter(|own| related(own, &mechanism)) else { return mechanism };
    match (own.as_soft(), mechanism.as_soft()) {
        _ if own.id() == mechanism.id() => own.clone(),
        (Some(own), Some(preset)) => own.with_degree(preset.degree).into(),
        _ if mechanism.landmark_kind().is_none() => own.clone().without_landmarks(),
        _ => mechanism,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relatives_take_the_settings_and_keep_what_makes_them() {
        let read = |json: &str| Mechanism::from_json(json).unwrap();
        let taken = |own: &str, id: &str| with_settings_of(Some(&read(own)), Mechanism::preset(id).unwrap());
        let plus = r#"{"mechanism": "soft-pp", "inverse": "cholesky", "degree": "token"}"#;
        assert_eq!(taken(plus, "soft-pp"), read(plus));
        assert_eq!(taken(plus, "soft"), read(r#"{"mechanism": "soft", "inverse": "cholesky"}"#));
        assert_eq!(
            taken(r#"{"mechanism": "soft", "ridge": 0.5}"#, "soft-pp"),
            read(r#"{"mechanism": "soft-pp", "ridge": 0.5}"#)
        );
        assert_eq!(
            taken(r#"{"mechanism": "laplacian", "weight_scale": "inv-n", "ridge": 0.5}"#, "laplacian-exact"),
            read(r#"{"mechanism": "laplacian-exact", "weight_scale": "inv-n"}"#)
        );
        assert_eq!(taken(plus, "uniform"), Mechanism::preset("uniform").unwrap());
    }
}
