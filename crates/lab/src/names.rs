//! Enums whose values have names: one table each for files, reports and command lines.

use std::str::FromStr;

/// An enum that [`named`](crate::named) makes.
pub trait Named: Copy + FromStr + 'static {
    /// What a name must be, for messages.
    const EXPECTED: &'static str;
}

/// An enum with the name of each value behind it, by which it is shown, parsed, and read and written by serde.
///
/// ```
/// resolvent_lab::named! {
///     /// A direction.
///     pub enum Direction {
///         /// Up.
///         Up = "up",
///         /// Down.
///         Down = "down",
///     }
/// }
/// assert_eq!("down".parse::<Direction>().unwrap().name(), "down");
/// assert_eq!("sideways".parse::<Direction>().unwrap_err(), "expected one of `up` `down`");
/// assert_eq!(serde_json::to_string(Direction::ALL).unwrap(), r#"["up","down"]"#);
/// ```
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* pub enum $type:ident { $($(#[$doc:meta])* $value:ident = $name:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $type { $($(#[$doc])* #[serde(rename = $name)] $value),+ }

        impl $type {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$value),+];

            /// The name in files and on command lines.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$value => $name),+ }
            }
        }

        impl $crate::names::Named for $type {
            const EXPECTED: &'static str = concat!("one of", $(" `", $name, "`"),+);
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> std::result::Result<Self, String> {
                let found = Self::ALL.iter().copied().find(|value| value.name() == text);
                found.ok_or_else(|| format!("expected {}", <Self as $crate::names::Named>::EXPECTED))
            }
        }
    };
}
