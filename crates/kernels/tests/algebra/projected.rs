//! Projected keys and values: the maps that a call gives, those that are drawn, and tokens that enter neither.

use crate::support;

use resolvent_kernels::{
    Error, Heads, Mechanism, Operator, Parameter, Sequences, Shape, Strategy, VarlenOperator, mechanism::Projected,
};
use support::{problem::Problem, random::problem};

const SHAPE: Shape = Shape { batch: 2, heads: 3, seq_q: 150, seq_kv: 290, head_dim: 20, value_dim: 12 };

fn mechanism(fields: &str) -> Mechanism {
    let json = format!(r#"{{"mechanism": "composed", "structure": {{"kind": "projected", "count": 37{fields}}}}}"#);
    Mechanism::from_json(&json).unwrap()
}

fn solve(p: &Problem) -> support::problem::Solution {
    p.solve::<f32>(Strategy::Fused, None).unwrap()
}

#[test]
fn maps_that_are_given_replace_those_that_are_drawn() {
    for fields in ["", r#", "per_head": true"#, r#", "max_tokens": 300, "seed": 9"#] {
        let p = problem(mechanism(fields), SHAPE, 1);
        let mut given = p.clone();
        for parameter in [Parameter::KeyMap, Parameter::ValueMap] {
            given.parameters.insert(parameter, p.mechanism.parameter_default(parameter, &SHAPE));
        }
        let drawn = solve(&p);
        assert_eq!(solve(&given), drawn, "{fields}");
        for map in given.parameters.values_mut() {
            map.iter_mut().for_each(|x| *x *= -0.5);
        }
        assert_ne!(solve(&given)["out"], drawn["out"], "{fields}");
    }
}

/// Columns of maps for fewer tokens are the first of those for more, given or drawn, and the others get no gradient.
#[test]
fn shorter_sequences_take_the_first_columns() {
    let narrow = solve(&problem(mechanism(""), SHAPE, 2));
    let wide = solve(&problem(mechanism(r#", "max_tokens": 400"#), SHAPE, 2));
    for (name, x) in &narrow {
        if !["dkey_map", "dvalue_map"].contains(name) {
            assert_eq!(x, &wide[name], "{name}");
            continue;
        }
        for (wide, narrow) in wide[name].chunks_exact(400).zip(x.chunks_exact(SHAPE.seq_kv)) {
            assert_eq!(wide[..SHAPE.seq_kv], *narrow, "{name}");
            assert!(wide[SHAPE.seq_kv..].iter().all(|&x| x == 0.0), "{name}");
        }
    }
    assert!(narrow["dkey_map"].iter().any(|&x| x != 0.0));
}

#[test]
fn masked_tokens_enter_nothing_whatever_they_hold() {
    let mut p = problem(mechanism(""), SHAPE, 3);
    p.key_mask = Some((0..2 * SHAPE.seq_kv).map(|n| n % 3 != 1).collect());
    p.query_mask = Some((0..2 * SHAPE.seq_q).map(|n| n % 4 != 2).collect());
    let expected = solve(&p);
    let mut poisoned = p.clone();
    let poison = |x: &mut [f64], keep: &[bool], [seq, dim]: [usize; 2]| {
        for (n, row) in x.chunks_exact_mut(dim).enumerate() {
            if !keep[n / seq / SHAPE.heads * seq + n % seq] {
                row.fill(f64::NAN);
            }
        }
    };
    let (keys, queries) = (p.key_mask.as_ref().unwrap(), p.query_mask.as_ref().unwrap());
    poison(&mut poisoned.q, queries, [SHAPE.seq_q, SHAPE.head_dim]);
    poison(&mut poisoned.dout, queries, [SHAPE.seq_q, SHAPE.value_dim]);
    poison(poisoned.k.as_mut().unwrap(), keys, [SHAPE.seq_kv, SHAPE.head_dim]);
    poison(&mut poisoned.v, keys, [SHAPE.seq_kv, SHAPE.value_dim]);
    assert_eq!(solve(&poisoned), expected);
    p.key_mask = Some(vec![false; 2 * SHAPE.seq_kv]);
    assert!(solve(&p).iter().all(|(name, x)| *name == "lse" || x.iter().all(|&x| x == 0.0)));
}

#[test]
fn what_has_no_meaning_is_refused_with_the_remedy() {
    let narrow = Operator::new(&mechanism(r#", "max_tokens": 289"#), SHAPE, false, Strategy::Auto).unwrap_err();
    assert!(matches!(&narrow, Error::OutOfRange { field: "structure.max_tokens", .. }), "{narrow}");
    let causal = Operator::new(&mechanism(""), Shape::square(1, 1, 8, 4), true, Strategy::Auto).unwrap_err();
    assert!(causal.to_string().contains("past and future"), "{causal}");
    for (field, why) in [
        (r#""series": "hops""#, "no second hop"),
        (r#""normalisation": "frobenius""#, "none of which is a token"),
        (r#""normalisation": {"kind": "row", "density_exponent": 0.5}"#, "single pairs"),
        (r#""bias": "alibi""#, "without pairs"),
        (r#""structure": {"kind": "projected", "count": 0}"#, "1 to 65536"),
    ] {
        let structure = if field.contains("structure") { "" } else { r#", "structure": "projected""# };
        let error = Mechanism::from_json(&format!(r#"{{"mechanism": "composed", {field}{structure}}}"#)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    // Sequences of several lengths share maps that have a longest one.
    let sequences = Sequences::new(&[0, 3, 8]).unwrap();
    let heads = Heads { heads: 1, kv_heads: 1, head_dim: 4, value_dim: 4 };
    for fields in ["", r#", "max_tokens": 8"#] {
        VarlenOperator::new(&mechanism(fields), heads, &sequences, false, Strategy::Auto).unwrap();
    }
    let few = mechanism("").caution_at(&Shape::square(1, 1, 16, 4));
    assert!(few.is_some_and(|text| text.contains("count")) && mechanism("").caution_at(&SHAPE).is_none());
}

/// The map is a constant of the seed: normal, of variance one over the projected tokens.
#[test]
fn drawn_maps_are_normal_and_of_their_seed() {
    let m = Projected::default().with_count(64);
    let map = m.map(Parameter::KeyMap, 1, 1000);
    let (mean, square) = map.iter().fold((0.0, 0.0), |(a, b), &x| (a + f64::from(x), b + f64::from(x).powi(2)));
    let n = map.len() as f64;
    assert!((mean / n).abs() < 0.002 && (square / n * 64.0 - 1.0).abs() < 0.02, "{} {}", mean / n, square / n);
    assert_ne!(map, m.map(Parameter::ValueMap, 1, 1000));
    assert_ne!(map, m.with_seed(1).map(Parameter::KeyMap, 1, 1000));
}
