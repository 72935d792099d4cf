//! What is changed into what.

use syn::{BinOp, Lit};

/// The operator that takes the place of another: of the same precedence, so that the operands keep their shape.
pub fn binary(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::Add(_) => "-",
        BinOp::Sub(_) => "+",
        BinOp::Mul(_) => "/",
        BinOp::Div(_) | BinOp::Rem(_) => "*",
        BinOp::And(_) => "||",
        BinOp::Or(_) => "&&",
        BinOp::Lt(_) => "<=",
        BinOp::Le(_) => "<",
        BinOp::Gt(_) => ">=",
        BinOp::Ge(_) => ">",
        BinOp::Eq(_) => "!=",
        BinOp::Ne(_) => "==",
        BinOp::BitAnd(_) => "|",
        BinOp::BitOr(_) => "&",
        BinOp::AddAssign(_) => "-=",
        BinOp::SubAssign(_) => "+=",
        BinOp::MulAssign(_) => "/=",
        BinOp::DivAssign(_) => "*=",
        _ => return None,
    })
}

/// Pairs of methods that take the same arguments and mean something else.
const METHODS: &[(&str, &str)] = &[
    ("min", "max"),
    ("any", "all"),
    ("floor", "ceil"),
    ("is_some", "is_none"),
    ("is_some_and", "is_none_or"),
    ("add_f32s", "sub_f32s"),
    ("add_f64s", "sub_f64s"),
    ("add_u32s", "sub_u32s"),
    ("mul_f32s", "div_f32s"),
    ("max_f32s", "min_f32s"),
    ("reduce_max_f32s", "reduce_min_f32s"),
    ("reduce_sum_f32s", "reduce_max_f32s"),
    ("less_than_f32s", "greater_than_f32s"),
    ("and_u32s", "or_u32s"),
    ("wrapping_dyn_shr_u32s", "wrapping_dyn_shl_u32s"),
];

/// The method called in place of another.
pub fn method(name: &str) -> Option<&'static str> {
    METHODS.iter().find_map(|&(a, b)| match name {
        _ if name == a => Some(b),
        _ if name == b => Some(a),
        _ => None,
    })
}

/// Methods without a result that are called for what they write.
const WRITES: &[&str] = &[
    "fill",
    "copy_from_slice",
    "clone_from_slice",
    "extend_from_slice",
    "push",
    "extend",
    "sort",
    "sort_unstable",
    "sort_by",
    "sort_by_key",
    "sort_unstable_by",
    "sort_unstable_by_key",
    "truncate",
    "clear",
    "swap",
    "insert",
    "for_each",
];

/// Whether a statement that calls `name` can be left out.
pub fn is_write(name: &str) -> bool {
    WRITES.contains(&name)
}

/// Another number in place of a literal.
pub fn literal(lit: &Lit) -> Option<String> {
    match lit {
        Lit::Int(int) => {
            let value: u64 = int.base10_parse().ok()?;
            Some(format!("{}{}", value.checked_add(1)?, int.suffix()))
        }
        Lit::Float(float) => {
            let value: f64 = float.base10_parse().ok()?;
            let suffix = float.suffix();
            Some(match value {
                0.0 => format!("1.0{suffix}"),
                1.0 => format!("0.0{suffix}"),
                _ => format!("{:?}{suffix}", 1.25 * value),
            })
        }
        Lit::Bool(bool) => Some((!bool.value).to_string()),
        _ => None,
    }
}
