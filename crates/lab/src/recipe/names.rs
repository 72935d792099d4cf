//! Names that may be meant by misspelt ones.

use toml::{Table, Value};

use super::{Recipe, builtin};

/// Likeness above which a name is suggested.
const ALIKE: f64 = 0.8;

/// What may be meant by the first name of serde's message about an unknown field or variant: one of the others that it names, or a field
/// of that name in a section.
pub(super) fn suggestion(message: &str) -> Option<String> {
    let unknown = message.find("unknown field `").or_else(|| message.find("unknown variant `"))?;
    let mut names = message[unknown..].split('`').skip(1).step_by(2);
    let given = names.next()?;
    let of_sections = Recipe::default().table().unwrap_or_default().into_iter().flat_map(|(section, value)| {
        let fields = if let Value::Table(fields) = value { fields } else { Table::new() };
        fields.into_iter().map(move |(field, _)| (format!("{section}.{field}"), field))
    });
    let meant = like(given, names).map(str::to_owned);
    let meant = meant.or_else(|| of_sections.into_iter().find(|(_, field)| field == given).map(|(key, _)| key))?;
    Some(format!("; did you mean `{meant}`?"))
}

/// The name that is most like `given`, if one is.
fn like<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let alike = names.map(|name| (strsim::jaro_winkler(given, name), name)).filter(|(likeness, _)| *likeness > ALIKE);
    alike.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// What is wrong with a recipe's name.
pub(super) fn unknown(name: &str) -> String {
    let meant = like(name, builtin::names()).map_or_else(String::new, |meant| format!(" (did you mean `{meant}`?)"));
    let names = builtin::names().collect::<Vec<_>>().join(", ");
    format!("is no built-in recipe{meant}: give one of {names}, or a file whose name ends in .toml")
}
