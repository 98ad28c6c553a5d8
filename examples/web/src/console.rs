//! Panics and `log` records on the browser's console, where the page picks them up.
//!
//! The reason why a browser rejects a shader reaches nothing but `log::error!`.

use log::{Level, LevelFilter, Log, Metadata, Record};
use wasm_bindgen::prelude::*;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = console)]
    fn error(text: &str);
    #[wasm_bindgen(js_namespace = console)]
    fn warn(text: &str);
    #[wasm_bindgen(js_namespace = console)]
    fn info(text: &str);
}

struct Console;

impl Log for Console {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        let text = format!("{}: {}", record.target(), record.args());
        match record.level() {
            Level::Error => error(&text),
            Level::Warn => warn(&text),
            Level::Info | Level::Debug | Level::Trace => info(&text),
        }
    }

    fn flush(&self) {}
}

pub fn install() {
    std::panic::set_hook(Box::new(|panic| error(&panic.to_string())));
    // Fails only where a logger is set already, and then that one stays.
    if log::set_logger(&Console).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
