//! What follows the name of a data set: `name=value`, several times.

use std::{fmt::Display, str::FromStr};

use super::{Error, Result};
use crate::names::Named;

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

    /// Its value as [`Field::set`] takes it, where it has one.
    fn text(&self) -> Option<String>;
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl Field for $number {
            fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
                *self = number(name, value)?;
                Ok(())
            }

            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        })*
    };
}

numbers!(u64, usize, f64);

impl<T: FromStr + Display> Field for Option<T> {
    fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
        *self = Some(number(name, value)?);
        Ok(())
    }

    fn text(&self) -> Option<String> {
        self.as_ref().map(T::to_string)
    }
}

impl<T: Named + Display> Field for T {
    fn set(&mut self, name: &'static str, value: &str) -> Result<()> {
        let unknown = |_| Error::Setting { field: name, got: format!("`{value}`"), expected: T::EXPECTED };
        *self = value.parse().map_err(unknown)?;
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// The settings of a generated data set: a struct of fields with their defaults, which `kind:name=value,...` sets, and which is shown so.
macro_rules! generated {
    ($kind:literal, $(#[$meta:meta])* pub struct $type:ident { $($(#[$doc:meta])* $field:ident: $of:ty = $default:expr),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $type { $($(#[$doc])* pub $field: $of),+ }

        impl Default for $type {
            fn default() -> Self {
                Self { $($field: $default),+ }
            }
        }

        impl $type {
            /// Reads `name=value` of these fields, joined by commas. What is left out has its default; but there are as many examples to watch as
            /// to test on where no `val` is given.
            ///
            /// # Errors
            /// [`Error::Setting`](crate::data::Error::Setting) for an unknown setting, one given twice or a value outside its range.
            pub fn parse(text: &str) -> $crate::data::Result<Self> {
                let mut own = Self::default();
                let expected = concat!("one of", $(" `", stringify!($field), "`",)+ ", each followed by `=` and a value");
                let fields: &mut [(&'static str, &mut dyn $crate::data::settings::Field)] =
                    &mut [$((stringify!($field), &mut own.$field)),+];
                $crate::data::settings::read_into($kind, text, expected, fields)?;
                own.validate()?;
                Ok(own)
            }
        }

        impl std::fmt::Display for $type {
            /// The settings as [`Self::parse`] reads them.
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let fields: &[(&str, &dyn $crate::data::settings::Field)] = &[$((stringify!($field), &self.$field)),+];
                let texts = fields.iter().filter_map(|(name, field)| Some(format!("{name}={}", field.text()?)));
                f.write_str(&texts.collect::<Vec<_>>().join(","))
            }
        }
    };
}
pub(super) use generated;

/// Reads `name=value`, joined by commas, into the `fields` of the generated data set `kind`; those that are left out stay as they are, but
/// for `val`, which is then that of `test`. `expected` says what they are called.
///
/// # Errors
/// [`Error::Setting`] for a name that is none of theirs, one given twice, or a value that is no number.
pub(super) fn read_into(
    kind: &'static str,
    text: &str,
    expected: &'static str,
    fields: &mut [(&'static str, &mut dyn Field)],
) -> Result<()> {
    let given = settings(kind, text, ',')?;
    for (name, value) in &given {
        match fields.iter_mut().find(|(own, _)| own == name) {
            Some((own, field)) => field.set(own, value)?,
            None => return Err(Error::UnknownSetting { kind, name: (*name).into(), expected }),
        }
    }
    let test = fields.iter().find(|(name, _)| *name == "test").and_then(|(_, test)| test.text());
    let val = fields.iter_mut().find(|(name, _)| *name == "val" && given.iter().all(|(given, _)| given != name));
    if let (Some(test), Some((name, val))) = (test, val) {
        val.set(name, &test)?;
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
