//! `wasm-glue IN.wasm OUT_DIR`: writes `OUT_DIR/lab.js` and `OUT_DIR/lab_bg.wasm`.

use std::{env, process::ExitCode};

use wasm_bindgen_cli_support::Bindgen;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let [input, out] = args.as_slice() else {
        eprintln!("usage: wasm-glue IN.wasm OUT_DIR");
        return ExitCode::from(2);
    };
    let mut bindgen = Bindgen::new();
    let made = bindgen
        .input_path(input)
        .out_name("lab")
        .typescript(false)
        // Names of functions are a third of the module, and nobody reads them there.
        .remove_name_section(true)
        .remove_producers_section(true)
        // Keep the default module URL, so that the page may call init() without one.
        .omit_default_module_path(false)
        .web(true)
        .and_then(|bindgen| bindgen.generate(out));
    match made {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wasm-glue: {error:#}");
            ExitCode::FAILURE
        }
    }
}
