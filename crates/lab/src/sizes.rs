//! Numbers of bytes as people write them.

/// Reads a number of bytes, such as `2GiB`, `500 MB` or `1048576`.
///
/// # Errors
/// What would be right.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1_u64 << 40,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => 0,
    };
    let bytes = number.parse::<f64>().map_or(0.0, |number| number * unit as f64);
    let range = 1.0..(1_u64 << 53) as f64;
    if range.contains(&bytes) { Ok(bytes as u64) } else { Err("give a size such as 2GiB or 500MB".into()) }
}

/// `bytes` for people.
pub fn size_text(bytes: u64) -> String {
    let scaled = |shift: u32| bytes as f64 / (1_u64 << shift) as f64;
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..0x10_0000 => format!("{:.1} KiB", scaled(10)),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", scaled(20)),
        _ => format!("{:.1} GiB", scaled(30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        let read = |text| parse_size(text).ok();
        assert_eq!(["2GiB", "500 MB", "1.5k", "7"].map(read), [2 << 30, 500_000_000, 1536, 7].map(Some));
        assert_eq!(["", "GiB", "-1", "0", "1e9", "9999999TiB", "2 pounds"].map(read), [None; 7]);
        assert_eq!([12, 2048, 3 << 19, 5 << 30].map(size_text), ["12 bytes", "2.0 KiB", "1.5 MiB", "5.0 GiB"]);
    }
}
