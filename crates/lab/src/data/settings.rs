//! What follows the name of a data set: `name=value`, several times.

use std::str::FromStr;

use super::{Error, Result};

/// Names and values in `text`, of the data set `field`. One without `=` has an empty value.
///
/// # Errors
/// [`Error::Setting`] for one that is given twice: neither of its values would be more meant than the other.
pub(super) fn settings<'a>(field: &'static str, text: &'a str, separator: char) -> Result<Vec<(&'a str, &'a str)>> {
    let mut found: Vec<(&str, &str)> = Vec::new();
    for setting in text.split(separator).filter(|setting| !setting.is_empty()) {
        let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
        if found.iter().any(|&(earlier, _)| earlier == name) {
            return Err(Error::Setting { field, got: format!("`{name}` twice"), expected: "given once" });
        }
        found.push((name, value));
    }
    Ok(found)
}

/// The number `value` of the setting `field`.
///
/// # Errors
/// [`Error::Setting`].
pub(super) fn number<T: FromStr>(field: &'static str, value: &str) -> Result<T> {
    let fail = |_| Error::Setting { field, got: format!("`{value}`"), expected: "a number in its range" };
    value.parse().map_err(fail)
}
