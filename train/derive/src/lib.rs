//! `#[derive(Module)]`: a struct of modules is a module.

use proc_macro::TokenStream;
use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Ident, Span};
use quote::quote;
use syn::{Data, DeriveInput, Fields, LitStr, spanned::Spanned};

/// Makes a struct whose fields are modules a module: parameters are found by the path of field
/// names that leads to them.
///
/// `#[name = "model.layers"]` gives a field another name (one with dots is a path, the empty one
/// adds nothing), `#[skip]` leaves a field out, for everything that holds no parameters.
/// `#[tied = "aliases"]` on the struct names its method that gives the names of tied parameters.
#[proc_macro_derive(Module, attributes(name, skip, tied))]
pub fn module(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input)
        .unwrap_or_else(|error| error.to_compile_error())
        .into()
}

fn expand(input: &DeriveInput) -> syn::Result<proc_macro2::TokenStream> {
    let Data::Struct(data) = &input.data else {
        return Err(syn::Error::new(
            input.span(),
            "a module is a struct: an enum or union has no fixed parameters",
        ));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(syn::Error::new(
            data.fields.span(),
            "the fields of a module need names: they are the names of its parameters",
        ));
    };
    let train = train_crate()?;
    let (mut reads, mut writes) = (vec![], vec![]);
    for field in &fields.named {
        if field.attrs.iter().any(|a| a.path().is_ident("skip")) {
            continue;
        }
        let Some(ident) = &field.ident else { continue };
        let mut name = ident.to_string();
        if let Some(attribute) = field.attrs.iter().find(|a| a.path().is_ident("name")) {
            let value = &attribute.meta.require_name_value()?.value;
            name = syn::parse2::<LitStr>(quote!(#value))?.value();
        }
        reads.push(quote! {
            #train::Module::visit(&self.#ident, &#train::join(path, #name), f);
        });
        writes.push(quote! {
            #train::Module::visit_mut(&mut self.#ident, &#train::join(path, #name), f);
        });
    }
    let tied = match input.attrs.iter().find(|a| a.path().is_ident("tied")) {
        None => quote!(),
        Some(attribute) => {
            let value = &attribute.meta.require_name_value()?.value;
            let method: Ident = syn::parse2::<LitStr>(quote!(#value))?.parse()?;
            quote! {
                fn tied(&self) -> ::std::vec::Vec<(::std::string::String, ::std::string::String)> {
                    self.#method()
                }
            }
        }
    };
    let ident = &input.ident;
    let (generics, types, clause) = input.generics.split_for_impl();
    Ok(quote! {
        impl #generics #train::Module for #ident #types #clause {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &#train::Param)) {
                #(#reads)*
            }
            fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut #train::Param)) {
                #(#writes)*
            }
            #tied
        }
    })
}

/// The path of the train crate in the crate that is compiled: its own, or inside of the facade.
fn train_crate() -> syn::Result<proc_macro2::TokenStream> {
    let named = |name: &str| Ident::new(&name.replace('-', "_"), Span::call_site());
    if let Ok(found) = crate_name("anymesh-train") {
        let name = match &found {
            FoundCrate::Itself => named("anymesh-train"),
            FoundCrate::Name(name) => named(name),
        };
        return Ok(quote!(::#name));
    }
    match crate_name("anymesh") {
        Ok(FoundCrate::Itself) => Ok(quote!(::anymesh::train)),
        Ok(FoundCrate::Name(name)) => {
            let name = named(&name);
            Ok(quote!(::#name::train))
        }
        Err(_) => Err(syn::Error::new(
            Span::call_site(),
            "the derive needs `anymesh` with the feature `train`, or `anymesh-train`, among the dependencies",
        )),
    }
}
