//! The precision of a recipe, by the name of what operands are rounded to.

use resolvent::Precision;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Name {
    F32,
    Bf16,
}

pub(super) fn serialize<S: Serializer>(precision: &Precision, s: S) -> Result<S::Ok, S::Error> {
    let name = if *precision == Precision::Bf16 { Name::Bf16 } else { Name::F32 };
    name.serialize(s)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Precision, D::Error> {
    Ok(match Name::deserialize(d)? {
        Name::F32 => Precision::Full,
        Name::Bf16 => Precision::Bf16,
    })
}
