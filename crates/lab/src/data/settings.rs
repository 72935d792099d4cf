//! What follows the name of a data set: `name=value`, several times.

use std::{fmt::Display, str::FromStr};

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

/// A field that a text sets.
pub(super) trait Field {
    /// Takes `value`, that of the setting `name`.
    ///
    /// # Errors
    /// [`Error::Setting`].
    fn set(&mut self, name: &'static str, value: &str) -> Result<()>;
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl Field for $number {
            fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
                *self = number(name, value)?;
                Ok(())
            }
        })*
    };
}

numbers!(u64, usize, f64);

impl<T: FromStr> Field for Option<T> {
    fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
        *self = Some(number(name, value)?);
        Ok(())
    }
}

/// A value that is one of a few, each with a name.
pub(super) trait Choice: Copy + Display + 'static {
    /// All of them.
    const ALL: &'static [Self];
    /// Their names, for messages.
    const NAMES: &'static str;
}

impl<T: Choice> Field for T {
    fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
        let found = T::ALL.iter().find(|choice| choice.to_string() == value);
        let unknown = || Error::Setting { field: name, got: format!("`{value}`"), expected: T::NAMES };
        *self = *found.ok_or_else(unknown)?;
        Ok(())
    }
}

/// Reads `name=value`, joined by commas, into the `fields` of the generated data set `kind`; those that are left out stay as they are.
/// `expected` says what they are called.
///
/// # Errors
/// [`Error::Setting`] for a name that is none of theirs, one given twice, or a value that is no number.
pub(super) fn read_into(
    kind: &'static str,
    text: &str,
    expected: &'static str,
    fields: &mut [(&'static str, &mut dyn Field)],
) -> Result<()> {
    for (name, value) in settings(kind, text, ',')? {
        match fields.iter_mut().find(|(own, _)| *own == name) {
            Some((own, field)) => field.set(own, value)?,
            None => return Err(Error::Setting { field: kind, got: format!("`{name}`"), expected }),
        }
    }
    Ok(())
}

/// The number `value` of the setting `field`.
///
/// # Errors
/// [`Error::Setting`].
pub(super) fn number<T: FromStr>(field: &'static str, value: &str) -> Result<T> {
    let fail = |_| Error::Setting { field, got: format!("`{value}`"), expected: "a number in its range" };
    value.parse().map_err(fail)
}

/// Refuses the setting `field` unless it is `valid`.
///
/// # Errors
/// [`Error::Setting`].
pub(super) fn check(field: &'static str, got: impl Display, valid: bool, expected: &'static str) -> Result<()> {
    if valid { Ok(()) } else { Err(Error::Setting { field, got: got.to_string(), expected }) }
}

/// Checks how many examples there are to learn from, to watch and to test on: none of them more than `most`, which `expected` says, and only
/// those to watch none.
///
/// # Errors
/// [`Error::Setting`].
pub(super) fn check_parts(train: usize, val: usize, test: usize, most: usize, expected: &'static str) -> Result<()> {
    check("train", train, (1..=most).contains(&train), expected)?;
    check("test", test, (1..=most).contains(&test), expected)?;
    check("val", val, val <= most, expected)
}
